"""Redistributions of a captured call begin early and end late, in the order in which they began."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.capture.passes import without
from dtorch.errors import RemoteError

from .same import MESH, captured, placed
from .test_buckets import GRID, Pair, whole

pytestmark = pytest.mark.usefixtures("engine")

LARGE = (130, 130)
"""Too large for a bucket."""


def rows(*shape: int, mesh: Any = MESH) -> Pair:
    """Whole numbers, a row a device: their sum is pending."""
    plain = torch.arange(math.prod(shape) * 2.0).remainder(7).view(2, *shape)
    return Pair(dtorch.distribute_tensor(plain, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1)), plain)


def ones() -> Pair:
    return Pair(placed(torch.ones(5)), torch.ones(5))


def check(function: Callable[..., Any], *given: Pair) -> list[str]:
    """The program of ``function``, which gives what plain torch gives."""
    compiled = dtorch.compile(function)
    expected = function(*[one.plain.clone() for one in given])
    args = [one.ours for one in given]
    for result in (compiled(*args), captured(compiled, *args), captured(compiled, *args)):
        for found, wanted in zip(result, expected, strict=True):
            assert torch.equal(found.to_torch(), wanted)
    return [line.partition("  #")[0].strip() for line in str(compiled.program).splitlines()]


def at(program: list[str], *texts: str) -> list[int]:
    """Where each text is, in turn."""
    found = [-1]
    for text in texts:
        found.append(next(n for n, line in enumerate(program) if n > found[-1] and text in line))
    return found[1:]


def test_what_is_computed_meanwhile() -> None:
    """A sum is shown before what does not need it, though that comes first, and fetched where it is needed."""

    def function(x: Any, y: Any) -> Any:
        doubled = x.sum(0)
        other = y.relu()
        x = whole(doubled)
        other = other + y
        return [x + 1, other]

    program = check(function, rows(*LARGE), ones())
    at(program, "aten.sum", ": begin", "aten.relu", "aten.add.Tensor", "): done", "aten.add")


def test_nothing_is_halved_that_hides_nothing() -> None:
    def function(x: Any) -> Any:
        return [whole(x.sum(0)) + 1]

    assert "begin" not in str(check(function, rows(*LARGE)))


def test_a_write_waits_for_the_end() -> None:
    def function(x: Any, y: Any) -> Any:
        x = x.sum(0)
        first = whole(x)
        y = y + 1
        x.mul_(0.5)
        return [first, whole(x), y]

    program = check(function, rows(*LARGE), ones())
    at(program, ": begin", "aten.add.Tensor", "): done", "aten.mul_")


def test_many_at_a_time() -> None:
    """They end in the order in which they began, however they are used."""

    def function(*given: Any) -> Any:
        y, *sums = given
        found = []
        for one in sums:
            found.append(whole(one.sum(0)))
            y = y * 3
        return [y, *[one + 1 for one in reversed(found)]]

    sums = [rows(130, 130 + n) for n in range(6)]
    program = check(function, ones(), *sums)
    kinds = [line.rpartition(": ")[2] for line in program if line.endswith((": begin", ": done"))]
    assert kinds.count("begin") == kinds.count("done") >= 5
    under_way = most = 0
    for kind in kinds:
        under_way += 1 if kind == "begin" else -1
        most = max(most, under_way)
    assert most == 3


def test_on_a_grid() -> None:
    """Along either axis, with others each time; what is reduced and what is gathered."""

    def moved(x: Any, *placements: Any) -> Any:
        return x.redistribute(placements=list(placements)) if isinstance(x, dtorch.Tensor) else x.clone()

    def function(x: Any, y: Any) -> Any:
        doubled, y = x * 2, y + 1
        one = moved(doubled, Replicate(), Replicate())
        z = y.relu() + y
        two = one * 3
        three = moved(z, Replicate(), Replicate())
        return [two, z.sum(0), three * 2]

    y = torch.arange(24.0).view(6, 4)
    ours = dtorch.distribute_tensor(y, GRID, [Shard(0), Shard(1)])
    assert "begin" in str(check(function, rows(*LARGE, mesh=GRID), Pair(ours, y)))


def test_it_is_told_once() -> None:
    def function(x: Any, y: Any) -> Any:
        doubled = x.sum(0)
        y = y.relu()
        return whole(doubled) + 1, y

    args = rows(*LARGE).ours, placed(torch.ones(5))
    told = []
    for off in ((), ("overlap",)):
        compiled = dtorch.compile(function)
        with without(*off):
            compiled(*args)
        with dtorch.record() as recording:
            compiled(*args)
        assert ("begin" in str(compiled.program)) == (not off)
        told.append([(one.kind, one.nbytes, one.shape) for one in recording.communication])
    assert told[0] == told[1]
    assert len(told[0]) == 1


def test_a_failure_meanwhile() -> None:
    """On one device, between the halves: the others are told, what does not need it is there, and all goes on."""

    def function(x: Any, table: Any, index: Any) -> Any:
        doubled = x.sum(0)
        good = whole(doubled)
        rows = table.index_select(0, index)
        later = whole((rows * 3).sum(0))
        return good + 1, later + 1

    x, table = rows(*LARGE), placed(torch.ones(8, 4))
    compiled = dtorch.compile(function)
    for last in (3, 99, 3, 99, 3):
        index = placed(torch.tensor([0, 1, 2, last]), Shard(0))
        good, later = compiled(x.ours, table, index)
        if last == 99:
            with pytest.raises(RemoteError, match="index out of range"):
                later.to_torch()
        else:
            assert torch.equal(good.to_torch(), x.plain.sum(0) + 1)
            assert torch.equal(later.to_torch(), torch.full((4,), 13.0))
    assert "begin" in str(compiled.program)
