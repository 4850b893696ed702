"""Small pending sums of a captured call are completed together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard

from .same import MESH, captured, close, placed

pytestmark = pytest.mark.usefixtures("engine")

GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], ("a", "b"))


class Pair(NamedTuple):
    """A pending sum, and the same number in plain torch."""

    ours: Any
    plain: torch.Tensor


def pending(*shape: int, mesh: DeviceMesh = MESH, dtype: torch.dtype = torch.float32) -> Pair:
    """A sum along each axis, of a row of numbers a device: small whole ones, so that every order of adding gives the same."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows = torch.randint(-8, 9, (*mesh.shape, *shape), generator=generator).to(dtype)
    axes = list(range(mesh.ndim))
    return Pair(dtorch.distribute_tensor(rows, mesh, [Shard(axis) for axis in axes]).sum(axes), rows.sum(axes))


def whole(x: Any) -> Any:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) if isinstance(x, dtorch.Tensor) else x.clone()


def sums(compiled: Any) -> int:
    """The all-reduces of what was recorded last."""
    return str(compiled.program).count("[Partial()] → [Replicate()]")


def check(function: Callable[..., Any], *given: Pair) -> Any:
    """The compiled function, which gives what plain torch gives."""
    compiled = dtorch.compile(function)
    expected = function(*[one.plain.clone() for one in given])
    args = [one.ours for one in given]
    for result in (compiled(*args), captured(compiled, *args)):
        for found, wanted in zip(result, expected, strict=True):
            assert torch.equal(found.to_torch(), wanted)
    return compiled


def test_sums_that_nobody_waits_for_are_one() -> None:
    given = [pending(3, 4), pending(5), pending(), pending(1)]
    assert all(one.ours.placements == [Partial()] for one in given)
    assert sums(check(lambda *given: [whole(t) for t in given], *given)) == 1
    assert sums(check(lambda a, b: [whole(a[:, 1]), whole(b)], pending(3, 4), pending(2))) == 1  # not contiguous
    assert (
        sums(check(lambda a, b: [whole(a.t()), whole(b.t())], pending(3, 4), pending(6, 2))) == 2
    )  # a layout of its own


def test_a_sum_that_is_needed_waits_no_longer() -> None:
    def function(a: Any, b: Any, c: Any) -> list[Any]:
        a, b = whole(a), whole(b)
        return [a * 3 + b[0], whole(c * 2) + 1, a]

    assert sums(check(function, pending(3, 4), pending(3, 4), pending(4))) == 2


def test_a_sum_is_of_what_was_there_before_a_write() -> None:
    def function(a: Any, b: Any) -> list[Any]:
        a = a * 1  # pending still
        first = whole(a)
        a.mul_(0.5)
        return [first, whole(a), whole(b)]

    assert sums(check(function, pending(3, 4), pending(5))) == 2


def test_sums_of_several_kinds() -> None:
    """By dtype and axes; large ones are not held up."""
    given = [
        pending(4),
        pending(6),
        pending(4, dtype=torch.bfloat16),
        pending(6, dtype=torch.bfloat16),
        pending(130, 130),
    ]
    assert sums(check(lambda *given: list(map(whole, given)), *given)) == 3


def test_on_a_grid() -> None:
    given = [pending(4, mesh=GRID), pending(3, 2, mesh=GRID)]
    rows = [Pair(one.ours.redistribute(placements=[Partial(), Replicate()]), one.plain) for one in given]
    compiled = check(lambda *given: [whole(t) for t in given], *given, *rows)
    assert str(compiled.program).count(" = redistribute(") == 2


def test_gradients_of_data_parallel_training() -> None:
    def trained(place: Any, split: Any, wrap: Any) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)
        )
        model = place(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        data = torch.Generator().manual_seed(1)
        losses = [
            step(split(torch.randn(7, 4, generator=data)), split(torch.randn(7, 2, generator=data))) for _ in range(5)
        ]
        return [*losses, *model.parameters()], step

    expected, _ = trained(lambda m: m, lambda t: t, lambda f: f)
    found, step = trained(
        lambda m: dtorch.distribute_module(m, MESH, {}), lambda t: placed(t, Shard(0)), dtorch.compile
    )
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    assert sums(step) == 1
