"""A value read inside splits the program there: Python's decision is the recorded one, or the call is run as it is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Shard

from .same import MESH, close, placed, runs

pytestmark = pytest.mark.usefixtures("simulated")

X = torch.arange(12.0).reshape(3, 4) / 7
W = torch.arange(16.0).reshape(4, 4) / 5 - 1


def silently(function: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args)


def test_both_ways(engine: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y - 1 if y.sum() > 20 else y.relu() + 1

    compiled = dtorch.compile(function)
    for step in (0, 1, 0, 1, 5, -1):
        close(silently(compiled, placed(X + step, Shard(0))), function(X + step))
    for step in (-3, -2, 3, 4):
        found, count = runs(compiled, placed(X + step, Shard(0)))
        close(found, function(X + step))
        assert count == 2 or step in (
            -3,
            3,
        )  # up to the read, and from there; first on another way, what led to the read again
    assert "is read, at" in str(compiled.program)
    assert "test_reads.py" in str(compiled.program)


def test_a_tree_of_values() -> None:
    def function(x: torch.Tensor) -> Any:
        count = int((x > 1).sum())
        for _ in range(count % 3):
            x = x * 1.5
        if x.max() > 3:
            x = x - x.mean()
        return x, count

    compiled = dtorch.compile(function)
    for step in (0, 1, 2, 0, 1, 2, 1):
        found, expected = silently(compiled, placed(X + step)), function(X + step)
        close(found[0], expected[0])
        assert found[1] == expected[1]


def test_the_ninth_value() -> None:
    compiled = dtorch.compile(lambda x: x * int(x[0, 0]))
    for step in range(8):
        close(silently(compiled, placed(X + step)), (X + step) * step)
    with pytest.warns(UserWarning, match=r"recorded 8 times.*a value that is read, at .*test_reads.py:\d+: .*int\("):
        close(compiled(placed(X + 100)), (X + 100) * 100)
    close(silently(compiled, placed(X + 3)), (X + 3) * 3)
    close(silently(compiled, placed(X + 200)), (X + 200) * 200)


def test_measurements_are_not_told_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x / x.max().item()

    compiled = dtorch.compile(function)
    with pytest.warns(UserWarning, match=r"op by op: a value is read, at .*test_reads.py:\d+: return x / x.max"):
        close(compiled(placed(X)), function(X))
    close(silently(compiled, placed(X + 1)), function(X + 1))


def test_what_is_written_before_a_read_is_written_once() -> None:
    def function(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return x if total.sum() > 20 else x * 2

    compiled = dtorch.compile(function)
    ours, plain = placed(torch.zeros(3, 4)), torch.zeros(3, 4)
    with pytest.warns(UserWarning, match="a value is read after something outside has been written in place, at"):
        close(compiled(placed(X), ours), function(X, plain))
    for _ in range(5):
        close(compiled(placed(X), ours), function(X, plain))
        close(ours, plain)


def test_random_numbers_and_counters_go_on() -> None:
    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(3)
        counter = torch.zeros((), dtype=torch.int64)

        def function(x: torch.Tensor) -> torch.Tensor:
            counter.add_(1)
            x = torch.nn.functional.dropout(x, 0.5) + torch.rand(4)
            if x.sum() > 12:
                x = x + torch.rand_like(x)
            counter.add_(10)
            return torch.nn.functional.dropout(x, 0.5)

        function = wrap(function)
        return [*[function(placed(X)).to_torch() for _ in range(12)], counter, torch.rand(1)]

    for found, expected in zip(run(lambda f: silently(dtorch.compile, f)), run(lambda f: f), strict=True):
        assert torch.equal(found, expected)


class Careful(torch.nn.Module):
    """Remembers what it was given, and raises where it is too large."""

    def __init__(self, place: Any) -> None:
        super().__init__()
        self.last = place(torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        if x.max() > 4:
            raise ValueError("too large")
        self.last = self.last + 1
        return self.last * x


def test_a_way_that_raises() -> None:
    ours, plain = Careful(placed), Careful(lambda t: t)
    compiled = dtorch.compile(ours)
    for step in (0, 1, 9, 0, 9, 1):
        if step == 9:
            for function, x in ((compiled, placed(X + step)), (plain, X + step)):
                with pytest.raises(ValueError, match="too large"):
                    function(x)
        else:
            close(silently(compiled, placed(X + step)), plain(X + step))
        close(ours.last, plain.last)


def test_a_failure_on_a_worker_is_raised_where_it_is_read(engine: str) -> None:
    def function(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        row = torch.embedding(x, at)
        return row * 2 if row.sum() > 0 else row

    compiled = dtorch.compile(function)
    good, bad = placed(torch.tensor([1])), placed(torch.tensor([99]))
    for _ in range(3):
        close(compiled(placed(X), good), X[1:2] * 2)
        with pytest.raises(dtorch.errors.RemoteError, match=r"(?s)index out of range.*torch.embedding\(x, at\)"):
            compiled(placed(X), bad)


def test_backward_outside(engine: str) -> None:
    ours, plain = torch.nn.Parameter(placed(W, Shard(1))), torch.nn.Parameter(W.clone())

    def function_of(weight: Any) -> Callable[[Any], Any]:
        def function(x: torch.Tensor) -> torch.Tensor:
            y = (x @ weight).sin()
            return (y * 3).sum() if y.sum() > 0 else (y * y).sum()

        return function

    compiled, function = dtorch.compile(function_of(ours)), function_of(plain)
    for step in (0, 1, 2, 3, 0, 1, 2, 3):
        found, expected = silently(compiled, placed(X + step)), function(X + step)
        close(found, expected)
        found.backward(), expected.backward()
        close(ours.grad, plain.grad)


def test_steps_that_are_left_out_by_the_norm() -> None:
    """As in training where a step with too large a gradient is left out: the norm is read before any parameter is written."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, {"0.*": [Shard(0)], "2.weight": [Shard(1)]})

    def step_of(module: Any) -> tuple[Callable[[Any], Any], Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            if torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0) < 1:
                optimizer.step()
            return loss.detach()

        return step, optimizer

    (ours, _), (theirs, optimizer) = step_of(model), step_of(plain)
    compiled = dtorch.compile(ours)
    counts = []
    for scale in (1, 1, 9, 1, 9, 1, 1, 9, 1, 1):
        found, count = runs(lambda s: silently(compiled, s), placed(X * scale))
        counts.append(count)
        close(found, theirs(X * scale))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.to_torch(), other, rtol=1e-4, atol=1e-5)
    assert counts[-1] == counts[-2] == 2
    assert 0 < next(iter(optimizer.state.values()))["step"] < 10


def test_a_gradient_scaler() -> None:
    """Which reads whether a gradient has become infinite, leaves such steps out, and scales by less from there on."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, {"0.*": [Shard(0)], "2.weight": [Shard(1)]})

    def step_of(module: Any) -> tuple[Callable[[Any], Any], Any]:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step, scaler

    (ours, our_scaler), (theirs, scaler) = step_of(model), step_of(plain)
    compiled = dtorch.compile(ours)
    counts = []
    for at in range(12):
        x = X.clone()
        x[0, 0] = float("inf") if at in (5, 9) else 1
        found, count = runs(lambda s: silently(compiled, s), placed(x))
        counts.append(count)
        close(found, theirs(x))
        assert our_scaler.get_scale() == scaler.get_scale()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.to_torch(), other, rtol=1e-4, atol=1e-5)
    assert counts[4] == counts[-1] == 2


def test_verify_knows_another_value_from_another_program() -> None:
    state = {"scale": 2}

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * state["scale"] if x.sum() > 10 else x + state["scale"]

    compiled = dtorch.compile(function, verify=True)
    for step in (0, 1, 0, 1):
        close(compiled(placed(X + step)), function(X + step))
    state["scale"] = 3
    with pytest.raises(dtorch.errors.DTorchError, match=r"(?s)neither an argument.*test_reads.py.*state\[.scale.\]"):
        compiled(placed(X + 1))
