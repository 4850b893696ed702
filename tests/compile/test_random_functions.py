"""Captured random functions on whole numbers give what plain torch gives, to the bit: with all passes, without each, and fused.

Their values are moved, written through views, returned and computed twice; two arguments may share memory.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.capture.passes import PASSES, without
from dtorch.worker import fused

SIZE = 4
MESH = DeviceMesh("cpu", [0, 1, 2], ("x",))
PLACEMENTS = (Replicate(), Shard(0), Shard(1))


class Step(NamedTuple):
    """What to do with two of the last values, how often, and where to."""

    what: str
    first: int
    second: int
    times: int
    placement: int


def moved(x: Any, placement: int) -> Any:
    """``x`` elsewhere; multiplied, so that it is a value of its own wherever it was."""
    return x.redistribute(placements=[PLACEMENTS[placement]]) * 1 if isinstance(x, dtorch.Tensor) else x * 1


def write(x: Any, y: Any) -> None:
    x.add_(y * 1).remainder_(5)  # not of memory that it writes to


DO = {
    "add": lambda a, b, p: [a + b],
    "product": lambda a, b, p: [(a @ b).remainder(5)],
    "moved product": lambda a, b, p: [moved(a @ b, p).remainder(5)],
    "product in shards and whole": lambda a, b, p: [
        (moved(c, q) + 1).remainder(5) for c in (a @ b,) for q in (p, (p + 1) % 3)
    ],
    "move": lambda a, b, p: [moved(a, p)],
    "chain": lambda a, b, p: [moved((moved(a @ b, 0) + 1).relu() * 2, p).remainder(5)],
    "copy": lambda a, b, p: [a.clone()],
    "view": lambda a, b, p: [a.t()],
    "write": lambda a, b, p: write(a, b),
    "write part": lambda a, b, p: a.split(2)[p % 2].mul_(2),
    "write column": lambda a, b, p: write(a.t()[p], b[0]),
}

steps = st.builds(
    Step, st.sampled_from(sorted(DO)), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2), st.integers(0, 2)
)


def function_of(plan: list[Step], wanted: set[int]) -> Any:
    def function(x: Any, y: Any) -> list[Any]:
        values = [x + 1, x, y]
        for step in plan:
            first, second = values[-min(step.first, len(values))], values[-min(step.second, len(values))]
            for _ in range(step.times):
                found = DO[step.what](first, second, step.placement)
                values += found if isinstance(found, list) else []
        made = values[3:]
        return [value for at, value in enumerate(made) if at in wanted] or [values[0]]

    return function


def given_tensors(alike: str) -> list[torch.Tensor]:
    x = torch.arange(SIZE * SIZE).remainder(5).double().view(SIZE, SIZE)
    return [x, {"own": x.flip(0), "same": x, "view": x.t()}[alike]]


def placed(alike: str, first: int, second: int) -> list[Any]:
    x, y = given_tensors(alike)
    ours = dtorch.distribute_tensor(x, MESH, [PLACEMENTS[first]])
    own = dtorch.distribute_tensor(y, MESH, [PLACEMENTS[second]])
    return [ours, {"own": own, "same": ours, "view": ours.t()}[alike]]


def check(plan: list[Step], wanted: set[int], alike: str, first: int, second: int, off: str | None) -> None:
    function = function_of(plan, wanted)
    fuses = off == "fused"
    with without(*([off] if off in PASSES else [])):
        compiled = dtorch.compile(function, backend="inductor" if fuses else None)
        for _ in range(3 if fuses else 2):
            plain, ours = given_tensors(alike), placed(alike, first, second)
            expected, found = function(*plain), compiled(*ours)
            pairs = list(zip([*found, *ours], [*expected, *plain], strict=True))
            assert all(torch.equal(one.to_torch(), other) for one, other in pairs)
            for number, (one, other) in enumerate(pairs):  # whoever shares memory shows it
                one.add_(number)
                other.add_(number)
            assert all(torch.equal(one.to_torch(), other) for one, other in pairs)


@pytest.fixture
def without_a_compiler(monkeypatch):
    """What is fused runs as the graph that the compiler would get."""
    monkeypatch.setattr(fused, "by_inductor", lambda module, inputs: module)


@pytest.mark.filterwarnings("ignore:dtorch.compile")
@pytest.mark.usefixtures("simulated", "without_a_compiler")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(steps, min_size=1, max_size=7),
    st.sets(st.integers(0, 8)),
    st.sampled_from(("own", "same", "view")),
    st.integers(0, 2),
    st.integers(0, 2),
    st.sampled_from((None, *PASSES, "fused")),
)
def test_random_functions(
    plan: list[Step], wanted: set[int], alike: str, first: int, second: int, off: str | None
) -> None:
    check(plan, wanted, alike, first, second, off)


@pytest.mark.filterwarnings("ignore:dtorch.compile")
@pytest.mark.usefixtures("simulated", "without_a_compiler")
def test_every_two_steps_fused() -> None:
    for number, (one, other) in enumerate(itertools.pairwise(sorted(DO))):
        plan = [Step("add", 1, 2, 2, 0), Step(one, 1, 2, 1, 0), Step("add", 1, 3, 2, 0), Step(other, 2, 1, 2, 1)]
        check(plan, set(range(9)), ("own", "view")[number % 2], 1, 2, "fused")


@pytest.mark.filterwarnings("ignore:dtorch.compile")
@pytest.mark.usefixtures("engine")
def test_every_two_steps() -> None:
    for number, (one, other) in enumerate(itertools.combinations(sorted(DO), 2)):
        plan = [Step(one, 1, 2, 2, 0), Step(other, 2, 1, 2, 1)]
        check(plan, set(range(9)), ("own", "view")[number % 2], 1, 2, None)
