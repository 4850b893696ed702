"""A captured function computes what it would: whatever it reads from outside, writes there, draws, or works out on the client."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.client import controller

from .same import MESH, captured, close, placed, runs

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("error:dtorch.compile")]

X = torch.arange(12.0).reshape(3, 4) / 7
W = torch.arange(16.0).reshape(4, 4) / 5 - 1


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def test_one_message() -> None:
    w = placed(W, Shard(1))
    function = dtorch.compile(lambda x: ((x @ w).relu().softmax(-1) - 1).sum(0))
    _, count = runs(function, placed(X))
    assert count > 3
    for x in (X, X + 1, X * 2):
        close(captured(function, placed(x)), ((x @ W).relu().softmax(-1) - 1).sum(0))


def test_new_shapes_placements_and_dtypes() -> None:
    w = placed(W, Shard(0))
    function = dtorch.compile(lambda x: x @ w.to(x.dtype))
    calls = [(X, Replicate()), (X[:2], Replicate()), (X, Shard(0)), (X.double(), Shard(1))]
    for x, where in calls:
        close(function(placed(x, where)), x @ W.to(x.dtype))
    for x, where in calls:
        found = captured(function, placed(x + 1, where))
        close(found, (x + 1) @ W.to(x.dtype))
        assert found.placements == function.function(placed(x, where)).placements


def test_python_arguments() -> None:
    def function(x: torch.Tensor, by: Any = 1, *, twice: bool = False, more: Any = ()) -> torch.Tensor:
        x = x * by
        for other in more:
            x = x + other
        return x * 2 if twice else x

    compiled = dtorch.compile(function)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((3,), {}), ((3.0,), {}), ((True,), {}), ((0.5,), {"twice": True}), ((), {"more": [placed(X), 2]}),
    ]  # fmt: skip
    for args, kwargs in calls:
        compiled(placed(X), *args, **kwargs)
    for args, kwargs in calls:
        plain = {"more": [X, 2]} if "more" in kwargs else kwargs
        result, count = runs(compiled, placed(X + 1), *args, **kwargs)
        assert count == 1
        close(result, function(X + 1, *args, **plain))


def test_parameters_are_read_at_the_call() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4))
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, {"0.*": [Shard(0)]})
    function = dtorch.compile(model)
    x = placed(X)
    close(function(x), plain(X))
    close(captured(function, x), plain(X))
    for change in (
        lambda m, p: m[0].weight.mul_(2),
        lambda m, p: setattr(m[0].weight, "data", p(W.repeat(2, 1)[:6])),
        lambda m, p: m.load_state_dict({name: value + 1 for name, value in m.state_dict().items()}),
        lambda m, p: setattr(m[2], "bias", torch.nn.Parameter(p(torch.ones(4)))),
        lambda m, p: m.__setitem__(1, torch.nn.Tanh()),
    ):
        change(plain, lambda t: t)
        change(model, lambda t: placed(t, *([Shard(0)] if t.ndim == 2 else [])))
        close(function(x), plain(X))
        close(captured(function, x), plain(X))


def test_what_the_function_writes() -> None:
    class Counter(torch.nn.Module):
        def __init__(self, place: Any) -> None:
            super().__init__()
            self.register_buffer("total", place(torch.zeros(3, 4)))
            self.last = place(torch.zeros(4))
            self.cache = {"x": place(torch.zeros(2, 3, 4))}
            self.moved = place(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x
            self.cache["x"][1].copy_(x)
            self.last = self.last * 0.5 + x.sum(0)
            self.moved.data = self.moved + 1
            return self.total * 2

    plain, module = Counter(lambda t: t), Counter(placed)
    function = dtorch.compile(module)
    for step in range(5):
        found, count = runs(function, placed(X + step))
        assert count == 1 or step < 1
        close(found, plain(X + step))
        for name in ("total", "last", "moved"):
            close(getattr(module, name), getattr(plain, name))
        close(module.cache["x"], plain.cache["x"])


def test_an_argument_is_written_and_returned_and_viewed() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.add_(1)
        y = x * 2
        return x, x[1:], y, y.view(-1)[:3]

    compiled = dtorch.compile(function)
    for _ in range(3):
        x, expected = placed(X.clone()), function(X.clone())
        result = compiled(x)
        assert result[0] is x
        result[1].mul_(3)
        result[3].zero_()
        expected[1].mul_(3)
        expected[3].zero_()
        for found, want in zip(result, expected, strict=True):
            close(found, want)


def test_the_same_tensor_twice() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    compiled = dtorch.compile(function)
    for _ in range(2):
        close(compiled(placed(X), placed(X)), X + 1 + X)
        x = placed(X)
        close(compiled(x, x), (X + 1) * 2)


def test_structures() -> None:
    def function(x: Any) -> Any:
        return {"a": [x["p"] + 1, (x["q"] * 2, None, "text")], "n": 3, "same": x["p"]}

    compiled = dtorch.compile(function)
    for step in range(3):
        given = {"p": placed(X + step), "q": placed(W)}
        result = compiled(given)
        close(result["a"][0], X + step + 1)
        close(result["a"][1][0], W * 2)
        assert result["a"][1][1:] == (None, "text")
        assert result["n"] == 3
        assert result["same"] is given["p"]


def test_work_on_the_client() -> None:
    """Positions and masks that depend on nothing are part of the program; what depends on an argument is worked out at each call."""

    def function(x: torch.Tensor, keep: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-1], device=x.device)
        mask = positions[None] <= torch.arange(x.shape[0], device=x.device)[:, None]
        table = torch.zeros(x.shape[-1])
        table[1:] = 2
        table *= scale + 1
        x = x.masked_fill(~mask, 0) + table
        return x * keep[:, None] + torch.tensor([1.0, 2, 3, 4])

    def on_mesh(x: torch.Tensor, keep: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return function(x, keep, scale)

    compiled = dtorch.compile(on_mesh)
    for step in range(4):
        keep, scale = torch.tensor([1.0, step, 0]), torch.full((4,), float(step))
        found, count = runs(compiled, placed(X), keep, scale)
        close(found, function(X, keep, scale))
        assert step == 0 or count == 1


def test_uncommitted_tensors_that_are_written() -> None:
    """A constant that gets an argument's values is none; and what counts is counted once, when a call has to be run anew, too."""

    def run(place: Any, device: Any, wrap: Any) -> list[Any]:
        count = torch.zeros(4, device=device)

        def function(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            table = torch.zeros(4, device=device)
            table[1:].add_(scale[1:])
            count.add_(1)
            rows = torch.ones(3, device=device)[: 2 if (count.sum() % 3).item() else 3]
            return x * table + rows.sum()

        function = wrap(function)
        calls = [function(place(X), torch.full((4,), float(n), device=device)) for n in range(9)]
        return [*calls, count]

    found = run(placed, placed(X).device, dtorch.compile)
    for one, other in zip(found, run(lambda t: t, "cpu", lambda f: f), strict=True):
        close(one, other)


def test_uncommitted_tensors_that_are_read() -> None:
    compiled = dtorch.compile(lambda x, n: x * 2 if (n + 1).item() > 2 else x * 3)
    for n in (0, 3, 0, 5, 1):
        x = placed(X)
        close(compiled(x, torch.tensor(n, device=x.device)), X * (2 if n + 1 > 2 else 3))
    compiled = dtorch.compile(lambda x, n: x * sum((n + 1).tolist()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in (0, 3, 5):
            x = placed(X)
            close(compiled(x, torch.tensor([n, 2], device=x.device)), X * (n + 4))


def test_what_each_layer_makes_of_a_mask_is_made_and_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, table = torch.zeros(4), torch.zeros(4)

    def function(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            counter.add_(1)
            mask = torch.where(keep, 0.0, -1.0)  # the same in each layer
            x = x * 2 + mask + counter * 3  # the counter is not
            scale = keep + 1.0
            scale[1] += 1  # nor is what is written
            x = x * scale
        table.copy_(counter)
        return x + table

    compiled, sent = dtorch.compile(function), []
    monkeypatch.setattr(controller, "observers", [lambda _, command, name, sequence: sent.append(name)])
    for step in range(4):
        keep = torch.tensor([True, False, step % 2 == 0, True])
        counter.zero_()
        sent.clear()
        x = placed(X)
        found = compiled(x, torch.tensor(keep.tolist(), device=x.device))
        assert step == 0 or sent.count("put") == 1 + 1 + 3 + 3 + 1  # x, the mask, and the others
        counter.zero_()
        close(found, function(X, keep))


def test_plain_tensors_outside_are_seen_when_they_change() -> None:
    table = torch.ones(4)
    compiled = dtorch.compile(lambda x: x + table * 2)
    for step in range(3):
        table[1] = step
        table.numpy()[2] = step
        close(compiled(placed(X)), X + table * 2)
    assert runs(compiled, placed(X))[1] == 1


def test_a_constant_that_is_written() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(4, device=x.device)
        for row in range(3):
            total += x[row]
        return total

    compiled = dtorch.compile(function)
    for step in range(3):
        close(compiled(placed(X + step)), (X + step).sum(0))


def test_numbers_put_into_a_tensor() -> None:
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        y = x.new_zeros(x.shape)
        y[:, 1:] = x[:, :-1]
        y[..., 0] = n
        y[0, 2] = -1.5
        return y

    compiled = dtorch.compile(function)
    for n in (3, 7):
        compiled(placed(X), n)
        close(captured(compiled, placed(X + n), n), function(X + n, n))


def test_random_numbers_go_on() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        return torch.nn.functional.dropout(x, 0.5) + noise.normal_()

    compiled = dtorch.compile(function)
    torch.manual_seed(5)
    expected = [function(placed(X)).to_torch() for _ in range(3)]
    after = torch.rand(2)
    torch.manual_seed(5)
    found = [compiled(placed(X)).to_torch() for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.rand(2), after)


def test_plain_random_numbers_go_on() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(4) + torch.rand_like(x)

    compiled = dtorch.compile(function)
    torch.manual_seed(5)
    expected = [function(placed(X)).to_torch() for _ in range(3)]
    torch.manual_seed(5)
    assert all(torch.equal(compiled(placed(X)).to_torch(), one) for one in expected)


def test_modes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.9))
    plain = copy.deepcopy(model)
    function = dtorch.compile(dtorch.distribute_module(model, MESH, {}))
    x = placed(X)
    function(x)
    model.eval(), plain.eval()
    for _ in range(2):
        close(function(x), plain(X))
    model.train()
    assert (function(x) == 0).sum().item() > 4
    model.eval()
    with torch.inference_mode():
        for _ in range(2):
            found = function(x)
            close(found, plain(X))
            assert found.is_inference()
    with torch.autocast("cpu", torch.bfloat16):
        assert function(x).dtype is function(x).dtype is torch.bfloat16
    assert function(x).dtype is torch.float32


def test_hooks() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    plain = copy.deepcopy(model)
    function = dtorch.compile(dtorch.distribute_module(model, MESH, {}))
    x = placed(X)
    for module in (plain, model):
        module[0].register_forward_hook(lambda m, args, out: out * 2)
    for _ in range(2):
        close(function(x), plain(X))
    handles = [module.register_forward_pre_hook(lambda m, args: (args[0] + 1,)) for module in (plain, model)]
    for _ in range(2):
        close(function(x), plain(X))
    for handle in handles:
        handle.remove()
    close(function(x), plain(X))
    assert runs(function, x)[1] == 1


def test_another_object_in_the_same_place() -> None:
    class Holder:
        def __init__(self, value: float) -> None:
            self.inner = {"t": placed(torch.full((4,), value))}

    holder = Holder(1)
    function = dtorch.compile(lambda x: x + holder.inner["t"])
    for _ in range(2):
        close(function(placed(X)), X + 1)
    holder.inner = {"t": placed(torch.full((4,), 5.0))}
    close(function(placed(X)), X + 5)
    holder = Holder(7)
    close(function(placed(X)), X + 7)


def test_methods_and_attributes() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(placed(W))

        @dtorch.compile
        def double(self, x: torch.Tensor) -> torch.Tensor:
            """Twice."""
            return x @ self.weight * 2

    first, second = Model(), Model()
    second.weight.data = placed(W + 1)
    for _ in range(2):
        close(first.double(placed(X)), X @ W * 2)
        close(second.double(placed(X)), X @ (W + 1) * 2)
    assert Model.double.__doc__ == "Twice."
    assert dtorch.compile(first).weight is first.weight


def test_uneven_and_empty_shards() -> None:
    x = torch.arange(5.0).reshape(1, 5)
    function = dtorch.compile(lambda t: (t * 2).softmax(-1).sum(0) + t[:0].sum())
    for step in range(2):
        close(function(placed(x + step, Shard(0))), ((x + step) * 2).softmax(-1).sum(0))


def test_torch_func_inside() -> None:
    w = placed(W)
    gradient = torch.func.grad(lambda t, w: (t @ w).square().sum())
    compiled = dtorch.compile(lambda x: torch.vmap(lambda t: t.softmax(0) * 2)(gradient(x, w)))
    for step in range(3):
        x = X + step
        close(compiled(placed(x)), torch.vmap(lambda t: t.softmax(0) * 2)(gradient(x, W)))
    assert runs(compiled, placed(X))[1] == 1


def test_inside_another() -> None:
    inner = dtorch.compile(lambda x: x * 2 + 1)
    outer = dtorch.compile(lambda x: inner(x) + inner(x + 1))
    for _ in range(2):
        close(outer(placed(X)), X * 4 + 4)
    close(captured(outer, placed(X)), X * 4 + 4)


def test_an_exception_passes_and_leaves_nothing() -> None:
    def function(x: torch.Tensor, fail: bool) -> torch.Tensor:
        y = x + 1
        if fail:
            raise KeyError("mine")
        return y * 2

    compiled = dtorch.compile(function)
    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            compiled(placed(X), True)
    for _ in range(2):
        close(compiled(placed(X), False), (X + 1) * 2)
    with pytest.raises(RuntimeError, match="must match"):
        dtorch.compile(lambda x: x + placed(torch.ones(7)))(placed(X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(placed(X) + 1, X + 1)
