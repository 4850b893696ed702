"""The ring is a ring: what its program says about order, bytes and work, with nothing running."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import dtorch
from dtorch.placement import PlacementList, shard
from dtorch.program.ir import Local, Program, Rearrange, Roles, ShiftDone, ShiftStart, outs_of, slots_of
from dtorch.sharding import attention as planning
from dtorch.sharding.layout import box_shape
from dtorch.sharding.roles import roles_of, sizes_of
from dtorch.sharding.sequence import Sizes, boxes, step_tasks
from dtorch.sharding.spec import Spec

RING = Roles((), (), (0,))


def plans(n: int, is_causal: bool, dtype: torch.dtype = torch.float32) -> tuple[planning.AttentionPlan, ...]:
    """Forward and backward on a ring of ``n``, and what of k and v one device holds."""
    mesh = dtorch.init_device_mesh("cpu", n, ("ring_cp",))
    placements = PlacementList([shard(2)])
    x = Spec.of(mesh, placements, (2, 4, 8 * n, 16), None, dtype)
    lse = Spec.of(mesh, placements, (2, 4, 8 * n), None, torch.float32)
    attention = planning.Attention(mesh, RING, sizes_of(x, x), is_causal, False, True)
    return (
        planning.forward(attention, x, x, x, None, None, [0, 1, 2, 3], True),
        planning.backward(attention, x, x, x, None, None, x, lse, x, False),
    )


def blocks(program: Program) -> list[int]:
    return [i for i, one in enumerate(program.body) if isinstance(one, Local) and "block" in one.name]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_each_hop_is_hidden_behind_the_block_at_hand(n: int, is_causal: bool) -> None:
    """At every step but the last the block sets out to the next device before it is computed on, and the next block is
    received after that: nobody waits for a transfer that has had no computation to hide it."""
    for plan in plans(n, is_causal):
        body = plan.program.body
        computes = blocks(plan.program)
        assert len(computes) == n
        for step, at in enumerate(computes[:-1]):
            _, key, value, *_ = slots_of(body[at])
            before = [
                i for i, one in enumerate(body[:at]) if isinstance(one, ShiftStart) and one.source in (key, value)
            ]
            assert len(before) == 2
            _, next_key, next_value, *_ = slots_of(body[computes[step + 1]])
            arrivals = [
                i for i, one in enumerate(body) if isinstance(one, ShiftDone) and one.out in (next_key, next_value)
            ]
            assert len(arrivals) == 2
            assert all(at < i < computes[step + 1] for i in arrivals)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [2, 3, 8])
def test_shifts_end_in_the_order_in_which_they_begin(n: int, is_causal: bool) -> None:
    """So a count is all that a device needs to find what its neighbour left for it; nothing else communicates meanwhile."""
    for plan in plans(n, is_causal):
        under_way: list[str] = []
        for one in plan.program.body:
            if isinstance(one, ShiftStart):
                under_way.append(one.dtype)
            elif isinstance(one, ShiftDone):
                assert under_way.pop(0) == one.dtype
            elif isinstance(one, Rearrange):
                assert not under_way
            assert len(under_way) <= 4
        assert not under_way


@pytest.mark.parametrize("n", [2, 3, 8])
def test_bytes_that_travel(n: int) -> None:
    """Forward: each of the other devices' blocks once. Backward: those again, and a whole round of their gradients in float32."""
    share = 2 * 4 * 8 * 16
    for is_causal, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        sent = []
        for plan in plans(n, is_causal, dtype):
            hops = [one for one in plan.program.body if isinstance(one, ShiftStart)]
            numbers = [plan.operands[hop.nbytes.index - planning.NUMBERS] for hop in hops]
            assert all(total == n * most for most, total in numbers)
            sent.append(sum(most for most, _ in numbers))
        assert sent == [
            2 * (n - 1) * share * dtype.itemsize,
            2 * (n - 1) * share * dtype.itemsize + 2 * n * share * 4,
        ]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_only_a_block_of_keys_is_held_from_step_to_step(n: int) -> None:
    """No value that is like keys outlives the step it is used in, so no device collects what passes by."""
    for plan in plans(n, False):
        body = plan.program.body
        last = {slot: i for i, one in enumerate(body) for slot in slots_of(one)}
        steps = blocks(plan.program)
        for i, one in enumerate(body):
            if isinstance(one, ShiftDone):
                following = next((at for at in steps if at > i), len(body))
                after_next = next((at for at in steps if at > following), len(body))
                assert last.get(one.out, i) <= after_next, outs_of(one)


LENGTHS = [(4096, 4096), (5000, 5000), (4096, 1000), (1000, 4096), (3001, 2048)]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_causal_work_is_balanced(n: int, queries: int, keys: int) -> None:
    """No device computes more than 1.1 × the mean: of the whole, and so that nobody waits, at each step but the first (where
    all have their diagonals). Counted in scores by the very list of tasks that the workers run."""
    sizes = Sizes(1, 1, 1, queries, keys)
    work = [
        [sum(t.work for t in step_tasks(RING, True, sizes, (n,), (i,), step)) for i in range(n)] for step in range(n)
    ]
    for each in (*work, [sum(column) for column in zip(*work, strict=True)]):
        assert max(each) <= 1.1 * sum(each) / n


@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (21, 9), (9, 21), (2, 5), (1, 1), (40, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_score_is_computed_once(n: int, is_causal: bool, queries: int, keys: int) -> None:
    """Over all devices and steps, the tasks cover what the mask shows, and what they cover more is hidden by their diagonals."""
    sizes = Sizes(1, 1, 1, queries, keys)
    roles = RING if n > 1 else Roles((), (), ())
    seen = torch.zeros(queries, keys, dtype=torch.int64)
    for i, step in itertools.product(range(n), range(n)):
        rows = _positions("query", roles, is_causal, sizes, n, i, (1, 1, queries, 1))
        columns = _positions("key", roles, is_causal, sizes, n, (i - step) % n, (1, 1, keys, 1))
        for task in step_tasks(roles, is_causal, sizes, (n,), (i,), step):
            q, k = rows[slice(*task.queries)], columns[slice(*task.keys)]
            shown = torch.ones(len(q), len(k), dtype=torch.int64)
            if task.diagonal is not None:
                shown = shown.tril(task.diagonal)
            seen[q[:, None], k] += shown
    expected = torch.ones_like(seen)
    assert torch.equal(seen, expected.tril() if is_causal else expected)


def _positions(
    kind: str, roles: Roles, is_causal: bool, sizes: Sizes, n: int, i: int, shape: tuple[int, ...]
) -> torch.Tensor:
    held = boxes(kind, roles, is_causal, sizes, (n,), (i,), shape)
    assert all(math.prod(box_shape(box)[:2]) == 1 for box in held)
    return torch.cat([torch.arange(*box[2]) for box in held])


def test_an_axis_that_is_not_named_is_ulysses_where_heads_divide_evenly() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), ("x", "y"))
    placements = PlacementList([shard(2), shard(2)])

    def roles(heads: int, kv_heads: int) -> Roles:
        q, k = (Spec.of(mesh, placements, (1, h, 16, 8), None, torch.float32) for h in (heads, kv_heads))
        return roles_of(q, k, k, {})

    assert roles(8, 4) == Roles((), (0, 1), ())
    assert roles(8, 2) == Roles((), (0,), (1,))
    assert roles(3, 3) == Roles((), (), (0, 1))
