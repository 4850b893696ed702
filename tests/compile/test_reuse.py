"""What a captured call has computed or moved before it takes from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.program.reuse import REACH

from .same import captured, placed
from .test_buckets import pending, whole

pytestmark = pytest.mark.usefixtures("engine")

WEIGHT = torch.arange(24.0).view(6, 4).remainder(5)


def check(function: Callable[..., Any], *given: Any, sharing: bool = False) -> str:
    """The program of ``function``, which gives what plain torch gives. Of tensors given as (tensor, placement); ``sharing``: the second
    argument is a view of the first."""
    compiled = dtorch.compile(function)
    for run in (compiled, lambda *args: captured(compiled, *args)):
        plain = [tensor.clone() for tensor, _ in given]
        ours = [placed(tensor, placement) for tensor, placement in given]
        if sharing:
            plain[1], ours[1] = plain[0].view(4, 6), ours[0].view(4, 6)
        for found, wanted in zip(run(*ours), function(*plain), strict=True):
            assert torch.equal(found.to_torch(), wanted)
    return str(compiled.program)


def moves(program: str) -> int:
    return program.count(" = redistribute(")


def test_what_is_moved_twice_is_moved_once() -> None:
    def function(x: Any, y: Any) -> Any:
        weight = whole(y)  # as each of two layers with one weight, or a forward and a backward, gathers it
        return [x @ weight, (x + 1) @ whole(y)]

    assert moves(check(function, (WEIGHT.t(), Replicate()), (WEIGHT, Shard(0)))) == 1


def test_what_is_written_in_between_is_moved_again() -> None:
    def function(y: Any) -> Any:
        first = whole(y) * 2
        y.add_(1)
        return [first, whole(y) * 2]

    assert moves(check(function, (WEIGHT, Shard(0)))) == 2


def test_what_shares_memory_with_what_is_written() -> None:
    def function(x: Any, y: Any) -> Any:
        first = y * 2 + 1
        x.add_(1)
        return [first, y * 2 + 3]

    program = check(function, (WEIGHT, Replicate()), (WEIGHT, Replicate()), sharing=True)
    assert program.count("aten.mul.Tensor") == 2


def test_what_is_computed_twice_is_computed_once() -> None:
    def function(x: Any) -> Any:
        return [(x @ x.t()).relu() + 1, (x @ x.t()).relu() + 2]

    program = check(function, (WEIGHT, Replicate()))
    assert program.count("aten.mm") == program.count("aten.relu") == 1


def test_two_results_stay_two() -> None:
    compiled = dtorch.compile(lambda x: (x * 2, x * 2, x.clone(), x.clone()))
    for _ in range(2):
        results = compiled(placed(WEIGHT))
        for number, result in enumerate(results):
            result.add_(number)
        for number, result in enumerate(results):
            assert torch.equal(result.to_torch(), (WEIGHT * 2 if number < 2 else WEIGHT) + number)


def test_random_numbers_are_drawn_again() -> None:
    def function(x: Any) -> Any:
        return torch.rand_like(x) + 1, torch.rand_like(x) + 1, torch.dropout(x, 0.5, True), torch.dropout(x, 0.5, True)

    compiled = dtorch.compile(function)
    for _ in range(2):
        one, two, three, four = (result.to_torch() for result in compiled(placed(torch.ones(50))))
        assert not torch.equal(one, two)
        assert not torch.equal(three, four)


def test_nothing_is_kept_for_long() -> None:
    """A weight gathered again long after its last use costs memory meanwhile if it is not."""

    def function(x: Any, y: Any) -> Any:
        x = x @ whole(y)
        for _ in range(REACH + 1):
            x = x + 1
        return [x @ whole(y).t()]

    assert moves(check(function, (WEIGHT.t(), Replicate()), (WEIGHT, Shard(0)))) == 2


def test_less_is_sent_of_what_is_there() -> None:
    """A shard of what is whole is cut from it, and a sum that is there in shards is gathered."""

    def shard(x: Any) -> Any:
        return x.redistribute(placements=[Shard(0)]) if isinstance(x, dtorch.Tensor) else x.clone()

    def cut(x: Any) -> Any:
        first = whole(x)
        second = shard(x) * 2
        return [first, second]

    def gathered(x: Any) -> Any:
        first = shard(x)
        second = whole(x) * 2
        return [first, second]

    given = pending(6, 4)
    for function, expected in (
        (cut, "%1: [Replicate()] → [Shard(dim=0)]"),
        (gathered, "%1: [Shard(dim=0)] → [Replicate()]"),
    ):
        compiled = dtorch.compile(function)
        for _ in range(2):
            for found, wanted in zip(compiled(given.ours), function(given.plain), strict=True):
                assert torch.equal(found.to_torch(), wanted)
        assert expected in str(compiled.program)
