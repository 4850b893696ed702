"""An all-reduce is a reduce-scatter where shards are enough, and one with an all-gather behind it where that is cheaper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.capture.passes import without
from dtorch.program import scatter as module

from .test_buckets import GRID, pending, whole

pytestmark = pytest.mark.usefixtures("engine")


def shard(x: Any, dim: int = 0) -> Any:
    return x.redistribute(placements=[Shard(dim)]) if isinstance(x, dtorch.Tensor) else x.clone()


def kinds(compiled: Any, *args: Any) -> list[str]:
    """What a call communicates."""
    with dtorch.record() as recording:
        compiled(*args)
    return [one.kind for one in recording.communication]


def check(function: Callable[..., Any], *given: Any) -> list[str]:
    """What is communicated by ``function``, which gives what plain torch gives."""
    compiled = dtorch.compile(function)
    expected = function(*[one.plain.clone() for one in given])
    args = [one.ours for one in given]
    for _ in range(2):
        for found, wanted in zip(compiled(*args), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found.to_torch(), wanted)
    return kinds(compiled, *args)


@pytest.mark.parametrize("rows", [6, 7, 1])
def test_shards_are_enough(rows: int) -> None:
    def function(x: Any) -> Any:
        x = whole(x)
        return [shard(x), shard((x + 1).relu() * x)]

    assert check(function, pending(rows, 5)) == ["reduce_scatter" if rows > 1 else "all_reduce"]


def test_shards_of_another_dim() -> None:
    assert check(lambda x: [shard(whole(x) * 2, 1)], pending(6, 4)) == ["reduce_scatter"]


def test_two_sums_that_meet() -> None:
    def function(x: Any, y: Any) -> Any:
        return [shard(torch.maximum(whole(x), whole(y)).neg())]

    assert check(function, pending(6, 4), pending(6, 4)) == ["reduce_scatter"] * 2


def test_what_is_needed_whole_is_gathered_where_that_is_cheaper() -> None:
    def function(x: Any) -> Any:
        x = (whole(x) + 1).relu() * 2
        return [x.sum(0)]

    assert check(function, pending(6, 4)) == ["all_reduce"]
    large = pending(512, 256)
    assert check(function, large) == ["reduce_scatter", "all_gather"]
    assert check(lambda x: [whole(x).sum(0)], large) == ["all_reduce"]  # there is nothing to compute


def test_results_and_dtypes() -> None:
    def function(x: Any) -> Any:
        x = whole(x)
        return [(x * 2 > 3), (x * 2).relu().long()]

    found = check(function, pending(512, 256))
    assert found in (["all_reduce"], ["reduce_scatter", "all_gather", "all_gather"])


def test_what_is_written_stays_whole() -> None:
    def function(x: Any) -> Any:
        x = whole(x) + 1
        y = shard(x * 2)
        x.mul_(3)
        return [y, shard(x)]

    check(function, pending(512, 256))


def test_on_a_grid() -> None:
    """Along one axis; the other splits a dim, which stays."""

    def rows(x: Any) -> Any:
        return x.redistribute(placements=[Shard(0), Replicate()]) if isinstance(x, dtorch.Tensor) else x.clone()

    def function(x: Any) -> Any:
        x = x.redistribute(placements=[Replicate()] * 2) if isinstance(x, dtorch.Tensor) else x
        return [rows((x + 1) * 2)]

    given = pending(6, 4, mesh=GRID)
    given = given._replace(ours=given.ours.redistribute(placements=[dtorch.Partial(), Replicate()]))
    assert check(function, given) == ["reduce_scatter"]


def test_with_collectives_that_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.scatter, "__defaults__", (0,))

    def function(x: Any, y: Any) -> Any:
        x, y = whole(x) * 2, whole(y)
        both = x + y
        return [both, both.sum(0), shard(both + 1), (x - y).t(), shard(y, 1)]

    check(function, pending(5, 3), pending(5, 3))


def test_without_the_pass() -> None:
    compiled = dtorch.compile(lambda x: shard(whole(x) * 2))
    given = pending(6, 4).ours
    with without("scatter"):
        compiled(given)
    assert kinds(compiled, given) == ["all_reduce"]
