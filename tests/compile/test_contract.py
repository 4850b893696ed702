"""What is recorded when, what is not, and what people are told."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import dtorch
from dtorch import Shard

from .same import MESH, captured, close, placed, runs

pytestmark = pytest.mark.usefixtures("simulated")

X = torch.arange(12.0).reshape(3, 4) / 7
W = torch.arange(16.0).reshape(4, 4) / 5 - 1


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def silently(function: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args)


def test_a_tensor_printed_inside_is_printed_at_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        print(x.sum(), x)
        return x + 1

    compiled = dtorch.compile(function)
    with pytest.warns(
        UserWarning, match=r"op by op: a value is read, at .*test_contract.py:\d+: print\(x.sum\(\), x\)"
    ):
        close(compiled(placed(X)), X + 1)
    for _ in range(2):
        capsys.readouterr()
        close(silently(compiled, placed(X + 4)), X + 5)
        assert "tensor" in capsys.readouterr().out


def test_data_dependent_shapes() -> None:
    compiled = dtorch.compile(lambda x: x[x > 0.5])
    with pytest.warns(UserWarning, match="a shape depends on values"):
        close(compiled(placed(X)), X[X > 0.5])
    close(silently(compiled, placed(X + 1)), (X + 1)[X + 1 > 0.5])


def test_values_of_plain_tensors_decide() -> None:
    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + 1 if mask.all() else x * mask

    compiled = dtorch.compile(function)
    for mask in (torch.ones(4), torch.tensor([1.0, 0, 1, 0]), torch.ones(4), torch.tensor([0.0, 0, 1, 1])):
        close(silently(compiled, placed(X), mask), function(X, mask))
    _, count = runs(compiled, placed(X), torch.ones(4))
    assert count == 1

    def by_list(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:n] for n in lengths.tolist()])

    compiled = dtorch.compile(by_list)
    with pytest.warns(UserWarning, match="a plain tensor's values are read"):
        close(compiled(placed(X), torch.tensor([1, 2])), torch.cat([X[:1], X[:2]]))
    close(silently(compiled, placed(X), torch.tensor([3, 1])), torch.cat([X, X[:1]]))


def test_what_dtorch_cannot_see() -> None:
    array = np.ones(4, dtype=np.float32)
    compiled = dtorch.compile(lambda x: x + torch.from_numpy(array))
    with pytest.warns(UserWarning, match="numpy memory"):
        close(compiled(placed(X)), X + 1)
    array[:] = 5
    close(silently(compiled, placed(X)), X + 5)

    class Hidden:
        __slots__ = ("_get",)

        def __init__(self, tensor: Any) -> None:
            self._get = iter([tensor] * 5).__next__

    hidden = Hidden(placed(torch.ones(4)))
    compiled = dtorch.compile(lambda x: x + hidden._get())
    with pytest.warns(UserWarning, match=r"where dtorch.compile cannot see at .*hidden._get\(\)"):
        close(compiled(placed(X)), X + 1)
    seen = iter(range(100))
    kept: dict[int, Any] = {}
    compiled = dtorch.compile(lambda x: kept.setdefault(next(seen), x * 2) + 1)
    with pytest.warns(UserWarning, match="recorded 8 times.*what it reads from outside"):  # noqa: PT031
        for step in range(10):
            close(compiled(placed(X + step)), (X + step) * 2 + 1)
    for step in range(10):
        close(kept[step], (X + step) * 2)


def test_numpy_arguments() -> None:
    array = np.ones(4, dtype=np.float32)
    compiled = dtorch.compile(lambda x, a: x + torch.tensor(a) * float(np.float32(2)))
    with pytest.warns(UserWarning, match="numpy array"):
        close(compiled(placed(X), array), X + 2)
    array[0] = 7
    close(silently(compiled, placed(X), array), X + torch.from_numpy(array) * 2)
    compiled = dtorch.compile(lambda x, n: x * n)
    for n in (np.float64(2), np.float64(3), np.int64(2)):
        close(silently(compiled, placed(X), n), X * n.item())


def test_a_seed_inside() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.rand_like(x)

    compiled = dtorch.compile(function)
    with pytest.warns(UserWarning, match="random state is set"):
        first = compiled(placed(X)).to_torch()
    torch.manual_seed(9)
    assert torch.equal(compiled(placed(X)).to_torch(), first)


def test_drawn_as_torch_draws() -> None:
    compiled = dtorch.compile(lambda x: torch.nn.functional.dropout(x, 0.5))
    dtorch.shutdown()
    dtorch.init(engine="simulate", random="torch")
    x = placed(X)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match="drawn on the client"):
        found = [compiled(x).to_torch() for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(one, torch.nn.functional.dropout(X, 0.5)) for one in found)
    dtorch.shutdown()
    dtorch.init(engine="simulate")


def test_a_list_that_grows() -> None:
    seen: list[Any] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(x + 1)
        return x * 2

    compiled = dtorch.compile(function)
    with pytest.warns(UserWarning, match="appends them to lists"):  # noqa: PT031
        for step in range(5):
            close(compiled(placed(X + step)), (X + step) * 2)
    for step in range(5):
        close(seen[step], X + step + 1)


def test_the_ninth_recording() -> None:
    compiled = dtorch.compile(lambda x, scale: x * scale)
    for scale in range(8):
        close(silently(compiled, placed(X), scale), X * scale)
    with pytest.warns(UserWarning, match=r"recorded 8 times.*what varies is argument 'scale' \(6, 7, 100\)$") as told:
        close(compiled(placed(X), 100), X * 100)
    assert [one.filename for one in told] == [__file__]
    close(silently(compiled, placed(X), 200), X * 200)
    close(captured(compiled, placed(X), 3), X * 3)


class Cache(torch.nn.Module):
    """Keys of the tokens so far, in an attribute or in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.key: Any = None
        self.keys: list[Any] = [None]

    def in_attribute(self, token: torch.Tensor) -> torch.Tensor:
        self.key = token if self.key is None else torch.cat([self.key, token], 1)
        return self.key

    def in_list(self, token: torch.Tensor) -> torch.Tensor:
        self.keys[0] = token if self.keys[0] is None else torch.cat([self.keys[0], token], 1)
        return self.keys[0]


GROWING: dict[str, tuple[Any, str]] = {
    "attribute": (lambda token, cache, given: cache.in_attribute(token), r"'key', a tensor outside of it"),
    "list": (lambda token, cache, given: cache.in_list(token), r"item 0 of a list, a tensor outside of it"),
    "argument": (
        lambda token, cache, given: torch.cat([given[0]["key"], token], 1),
        r"argument \"given\[0\]\['key'\]\"",
    ),
}


@pytest.mark.parametrize("where", GROWING)
def test_a_cache_that_grows_is_what_varies(where: str) -> None:
    """Not the tokens, of which only the first call had more."""
    function, words = GROWING[where]

    def decode(step: Any, cache: Any, place: Any) -> list[Any]:
        found = []
        given: Any = [{"key": place(torch.zeros(3, 0))}]
        for i in range(14):
            tokens = torch.full((3, 4 if i == 0 else 1), float(i))
            out = step(place(tokens), cache, given)
            given = [{"key": out}] if where == "argument" else given
            found.append(out)
        return found

    expected = decode(function, Cache(), lambda x: x)
    lengths = r" \(\(3, \d+\) torch.float32 \[.*\], \(3, \d+\) torch.float32 \[.*\]\)$"
    with pytest.warns(UserWarning, match=f"recorded 8 times.* what varies is {words}{lengths}"):
        found = decode(dtorch.compile(function), Cache(), placed)
    for ours, plain in zip(found, expected, strict=True):
        close(ours, plain)


def test_what_varies_lately() -> None:
    compiled = dtorch.compile(lambda x, scale, kind: x * scale)
    for i in range(8):
        compiled(placed(X), i, "first" if i == 0 else "later")
    with pytest.warns(UserWarning, match=r"what varies is argument 'scale' \(6, 7, 8\)$"):
        compiled(placed(X), 8, "later")
    compiled = dtorch.compile(lambda x, kinds: x * 2)
    for i in range(8):
        compiled(placed(X), ["a"] * i)
    with pytest.warns(UserWarning, match=r"what varies is argument 'kinds' \(list of 6, list of 7, list of 8\)$"):
        compiled(placed(X), ["a"] * 8)
    compiled = dtorch.compile(lambda x, kinds: x * 2)
    for i in range(8):
        compiled(placed(X), {i: 1})
    with pytest.warns(UserWarning, match=r"what varies is argument 'kinds' \(a key 6, 7\)$"):
        compiled(placed(X), {8: 1})
    compiled = dtorch.compile(lambda x, kinds=None: x * 2)
    for i in range(8):
        compiled(placed(X), i)
    with pytest.warns(UserWarning, match=r"what varies is argument 'kinds' \(given, or not\)$"):
        compiled(placed(X))


def test_verify() -> None:
    state = {"scale": 2}
    compiled = dtorch.compile(lambda x: (x + 1).relu() * state["scale"], verify=True)
    for _ in range(3):
        close(compiled(placed(X)), (X + 1) * 2)
    state["scale"] = 3
    with pytest.raises(dtorch.errors.DTorchError, match=r"(?s)neither an argument.*test_contract.py.*state\[.scale.\]"):
        compiled(placed(X))
    table = [1.0, 2, 3, 4]
    compiled = dtorch.compile(lambda x: x + torch.tensor(table, device=x.device), verify=True)
    compiled(placed(X))
    compiled(placed(X))
    table[0] = 9
    with pytest.raises(dtorch.errors.DTorchError, match="a constant made on the client"):
        compiled(placed(X))


def test_two_threads() -> None:
    w = placed(W, Shard(1))
    compiled = dtorch.compile(lambda x: (x @ w).relu().sum(0))
    wrong: list[Any] = []

    def work(number: int) -> None:
        with torch.no_grad():
            for step in range(20):
                x = X + number * 100 + step
                found = compiled(placed(x)).to_torch()
                if not torch.allclose(found, (x @ W).relu().sum(0)):
                    wrong.append((number, step))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_print() -> None:
    w = placed(W, Shard(0))
    compiled = dtorch.compile(lambda x: (x @ w).softmax(-1))
    compiled(placed(X))
    text = str(compiled.program)
    assert "aten.mm.default(%" in text
    assert "redistribute(%" in text
    assert "→ [Replicate()]" in text
    assert "test_contract.py" in text


def test_nothing_is_left_on_the_workers() -> None:
    compiled = dtorch.compile(lambda x: ((x + 1) * 2, (x - 1).exp())[1])
    x = placed(X)
    compiled(x)
    compiled(x)
    dtorch.synchronize()
    before = dtorch.memory_stats()
    for _ in range(20):
        compiled(x)
    dtorch.synchronize()
    assert all(found["live"] <= before[device]["live"] for device, found in dtorch.memory_stats().items())


def test_after_another_cluster() -> None:
    compiled = dtorch.compile(lambda x: x + 1)
    compiled(placed(X))
    dtorch.shutdown()
    dtorch.init(engine="simulate")
    for _ in range(2):
        close(compiled(placed(X)), X + 1)


def test_an_error_on_a_worker_names_the_call() -> None:
    compiled = dtorch.compile(lambda x, i: torch.embedding(x, i) * 2)
    good = placed(torch.tensor([0, 1]))
    compiled(placed(X), good)
    bad = compiled(placed(X), placed(torch.tensor([0, 99])))
    with pytest.raises(dtorch.errors.RemoteError, match=r"index out of range"):
        bad.to_torch()
    close(compiled(placed(X), good), X[:2] * 2)


def test_deep_copies_of_modules_are_others() -> None:
    model = dtorch.distribute_module(torch.nn.Linear(4, 4), MESH, {})
    other = copy.deepcopy(model)
    other.weight.mul_(3)
    compiled = dtorch.compile(lambda m, x: m(x))
    for _ in range(2):
        for module in (model, other):
            found = compiled(module, placed(X))
            close(found, X @ module.weight.to_torch().T + module.bias.to_torch())


def test_a_list_returned_in_two_places_is_one_list() -> None:
    def both(x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        made = [x * 2]
        return {"first": made, "second": made}

    compiled = dtorch.compile(both)
    for i in range(3):
        found = compiled(placed(X + i))
        assert found["first"] is found["second"]
        close(found["second"][0], (X + i) * 2)


def test_plain_constants_are_returned_at_every_call() -> None:
    compiled = dtorch.compile(lambda x: (x + 1, torch.tensor(1.5), torch.arange(3) / 2))
    for i in range(3):
        found = compiled(placed(X + i))
        close(found[0], X + i + 1)
        assert found[1].item() == 1.5
        assert torch.equal(found[2], torch.arange(3) / 2)


@torch.enable_grad()
@pytest.mark.parametrize("where", ["tensor", "backward pre hook", "every module"])
def test_hooks_that_come_and_go(where: str) -> None:
    model, plain = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    dtorch.distribute_module(model, MESH, {})

    def step_of(module: torch.nn.Module):
        def step(x: torch.Tensor) -> torch.Tensor:
            module.zero_grad()
            module(x).sum().backward()
            return module.weight.grad.detach()

        return step

    def hook(module: torch.nn.Module):
        if where == "tensor":
            return module.weight.register_hook(lambda grad: grad * 10)
        if where == "backward pre hook":
            return module.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 10,))
        return torch.nn.modules.module.register_module_forward_hook(lambda _, args, out: out * 5)

    x = torch.rand(2, 4)
    ours, theirs = dtorch.compile(step_of(model)), step_of(plain)
    for hooked in (False, True, False):
        handles = []
        if hooked:
            handles = [hook(model)] if where == "every module" else [hook(model), hook(plain)]
        for _ in range(3):
            close(ours(placed(x)), theirs(x))
        for handle in handles:
            handle.remove()


@torch.enable_grad()
def test_optimizers_that_are_not_known_run_op_by_op() -> None:
    model, plain = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    dtorch.distribute_module(model, MESH, {})
    optimizers = [torch.optim.ASGD(m.parameters(), lr=0.1, foreach=False) for m in (model, plain)]

    def step_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer):
        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            module(x).square().sum().backward()
            optimizer.step()

        return step

    x = torch.rand(2, 4)
    ours, theirs = dtorch.compile(step_of(model, optimizers[0])), step_of(plain, optimizers[1])
    with pytest.warns(UserWarning, match="the steps of ASGD are not known"):
        ours(placed(x))
    theirs(x)
    for _ in range(4):
        ours(placed(x))
        theirs(x)
        close(model.weight, plain.weight)
