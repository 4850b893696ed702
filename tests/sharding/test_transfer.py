"""A transfer brings any placements to any others: what the devices end up with is the plain tensor, split anew."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.mesh import DeviceMesh, init_device_mesh
from dtorch.placement import REPLICATE, PlacementList, is_partial, is_shard, partial, shard
from dtorch.sharding.transfer import kind, moved_bytes, steps
from dtorch.worker.assemble import around, assemble, cut

CPU = torch.device("cpu")
R, P, S0, S1 = REPLICATE, partial(), shard(0), shard(1)


def split(tensor, mesh, placements):
    """What every device holds, by `torch.chunk` alone. An addend is integers, so that any order of sums is exact."""
    parts = {(): tensor}
    for size, placement in zip(mesh.shape, placements, strict=True):
        new = {}
        for coordinate, part in parts.items():
            if is_shard(placement):
                pieces = list(part.chunk(size, placement.dim))
                pieces += [part.narrow(placement.dim, 0, 0)] * (size - len(pieces))
            elif is_partial(placement):
                pieces = addends(part, size, placement.reduce_op)
            else:
                pieces = [part] * size
            new.update({(*coordinate, index): piece for index, piece in enumerate(pieces)})
        parts = new
    return {device: parts[mesh.coordinate(device)] for device in mesh.device_ids}


def addends(value, count, op):
    if op == "sum":
        first = [torch.randint(-5, 5, value.shape).to(value.dtype) for _ in range(count - 1)]
        return [*first, value - sum(first, torch.zeros_like(value))]
    return [value, *[value - torch.randint(0, 5, value.shape).to(value.dtype) for _ in range(count - 1)]]  # max


def run(source_mesh, source, target_mesh, target, shape, locals_, dtype=torch.float64):
    """Every device's steps in lockstep, each with only what of the tensors its transfer may read."""
    devices = sorted({*source_mesh.device_ids, *target_mesh.device_ids})
    plans = {d: steps(source_mesh, source, target_mesh, target, shape, dtype, d) for d in devices}
    for level in range(-max(map(len, plans.values())), 0):
        results = {}
        for device, plan in plans.items():
            if len(plan) < -level:
                continue
            part = plan[level]
            assert part.device == device
            assert device in part.group

            def read(other, part=part, level=level, locals_=locals_):
                assert other in part.group
                if other == part.device:
                    return locals_[other]
                assert plans[other][level].publishes
                kept = plans[other][level].kept
                shown = locals_[other].clone()
                if kept is not None:
                    cut(shown, kept).fill_(1e9)
                return shown

            if part.shape is not None:
                results[device] = assemble(part, read, CPU)
        locals_ = results
    return locals_


def placements_for(draw, mesh, ndim, partials):
    choices = [R, *partials, *(shard(d) for d in range(ndim))]
    return PlacementList(draw(st.sampled_from(choices)) for _ in mesh.shape)


@st.composite
def meshes(draw, other=None):
    if other is not None and draw(st.booleans()):
        return other
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ids = draw(st.permutations(range(math.prod(shape) + 3)))[: math.prod(shape)]
    return DeviceMesh("cpu", torch.tensor(ids).reshape(shape))


@st.composite
def problems(draw):
    source_mesh = draw(meshes())
    target_mesh = draw(meshes(source_mesh))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    # Large enough, sometimes, for two phases.
    shape = tuple(n * draw(st.sampled_from([1, 1, 1, 40])) for n in shape)
    pending = partial(draw(st.sampled_from(["sum", "max"])))
    source = placements_for(draw, source_mesh, len(shape), [pending])
    target = placements_for(draw, target_mesh, len(shape), [P])
    return source_mesh, source, target_mesh, target, shape


@settings(max_examples=200, deadline=None)
@given(problems(), st.integers(0, 2**31))
def test_any_to_any(problem, seed):
    source_mesh, source, target_mesh, target, shape = problem
    torch.manual_seed(seed)
    whole = torch.randint(-100, 100, shape, dtype=torch.float64)
    results = run(*problem, split(whole, source_mesh, source))
    assert set(results) == set(target_mesh.device_ids)
    # Addends are summed along their axes; everything else is compared device by device.
    pending = [axis for axis, placement in enumerate(target) if is_partial(placement)]
    resolved = PlacementList(R if is_partial(p) else p for p in target)
    expected = split(whole, target_mesh, resolved)
    for device in target_mesh.device_ids:
        here = target_mesh.coordinate(device)
        ranges = [range(n) if axis in pending else (here[axis],) for axis, n in enumerate(target_mesh.shape)]
        peers = [
            d for c in itertools.product(*ranges) for d in target_mesh.device_ids if target_mesh.coordinate(d) == c
        ]
        total = sum((results[d] for d in peers), torch.zeros_like(results[device]))
        assert torch.equal(total, expected[device])


@settings(max_examples=150, deadline=None)
@given(problems())
def test_members_agree(problem):
    source_mesh, _, target_mesh, _, _ = problem
    devices = sorted({*source_mesh.device_ids, *target_mesh.device_ids})
    plans = {d: steps(*problem, torch.float32, d) for d in devices}
    for device, plan in plans.items():
        for level in range(-len(plan), 0):
            for other in plan[level].group:
                assert plans[other][level].group == plan[level].group
            read = any(
                piece.device == device
                for other in plan[level].group
                if other != device
                for term in plans[other][level].terms
                for piece in term
            )
            assert plan[level].publishes == read
    if kind(*problem) == "local":
        assert sum(moved_bytes(*problem, torch.float32).values()) == 0


def test_what_others_need_not_see():
    mesh = DeviceMesh("cpu", [0, 1, 2])

    def kept(source, target, device):
        (step,) = steps(mesh, PlacementList([source]), mesh, PlacementList([target]), (7, 5), torch.float32, device)
        return step.kept

    assert [kept(P, S0, device) for device in range(3)] == [((0, 3), (0, 5)), ((3, 6), (0, 5)), ((6, 7), (0, 5))]
    assert [kept(S0, S1, device) for device in range(3)] == [((0, 3), (0, 2)), ((0, 3), (2, 4)), ((0, 1), (4, 5))]
    assert [kept(source, R, device) for source in (P, S0) for device in range(3)] == [None] * 6


@pytest.mark.parametrize(
    ("box", "left"),
    [
        (None, [((0, 4), (0, 6))]),
        (((0, 4), (0, 2)), [((0, 4), (2, 6))]),
        (((0, 4), (3, 5)), [((0, 4), (0, 3)), ((0, 4), (5, 6))]),
        (((1, 2), (3, 5)), [((0, 4), (0, 6))]),
        (((0, 4), (0, 6)), [((0, 4), (0, 6))]),
    ],
)
def test_what_is_around_a_box(box, left):
    assert list(around((4, 6), box)) == left


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("source", "target", "name", "times"),
    [
        (R, S0, "local", lambda n: 0),
        (R, P, "local", lambda n: 0),
        (S0, P, "local", lambda n: 0),
        (S0, R, "all_gather", lambda n: n - 1),
        (S0, S1, "all_to_all", lambda n: (n - 1) / n),
        (P, S1, "reduce_scatter", lambda n: n - 1),
        (P, R, "all_reduce", lambda n: 2 * (n - 1)),
    ],
)
def test_moves_no_more_than_needed(n, source, target, name, times):
    mesh = init_device_mesh("cpu", n)
    problem = mesh, PlacementList([source]), mesh, PlacementList([target]), (48, 96)
    moved = moved_bytes(*problem, torch.float32)
    assert sum(moved.values()) == times(n) * 48 * 96 * 4
    assert max(moved.values()) == min(moved.values())
    assert kind(*problem) == name


def test_an_all_reduce_is_one_phase_where_members_can_share_it_out():
    """Of one mesh's cpu devices. Where anything else changes too, it is reduced into shards, which are then gathered."""
    mesh, shape = init_device_mesh("cpu", 4), (80, 80)
    (part,) = steps(mesh, PlacementList([P]), mesh, PlacementList([R]), shape, torch.float32, 0)
    assert part.is_all_reduce
    square = init_device_mesh("cpu", (2, 2))
    (part,) = steps(square, PlacementList([P, S0]), square, PlacementList([R, S0]), shape, torch.float32, 3)
    assert part.is_all_reduce
    assert part.group == (1, 3)
    for source, target in [([P], [S0]), ([S0], [R])]:
        (part,) = steps(mesh, PlacementList(source), mesh, PlacementList(target), shape, torch.float32, 0)
        assert not part.is_all_reduce
    other = init_device_mesh("cpu", (2, 2))
    two = steps(mesh, PlacementList([P]), other, PlacementList([R, R]), shape, torch.float32, 0)
    assert len(two) == 2
    assert not any(part.is_all_reduce for part in two)
    (part,) = steps(mesh, PlacementList([P]), other, PlacementList([R, R]), (8,), torch.float32, 0)
    assert not part.is_all_reduce


def test_only_the_fibre_takes_part():
    mesh = init_device_mesh("cpu", (3, 4))
    (part,) = steps(mesh, PlacementList([S0, S1]), mesh, PlacementList([S0, R]), (6, 8), torch.float32, 5)
    assert part.group == (4, 5, 6, 7)
    # The second axis splits the first one's shards: its own shards move when the first axis's do.
    (part,) = steps(mesh, PlacementList([S0, S0]), mesh, PlacementList([R, S0]), (24, 8), torch.float32, 5)
    assert part.group == tuple(range(12))
    (part,) = steps(mesh, PlacementList([S0, S0]), mesh, PlacementList([S0, R]), (24, 8), torch.float32, 5)
    assert part.group == (4, 5, 6, 7)


def test_readers_spread_over_replicas():
    source, target = init_device_mesh("cpu", 2), DeviceMesh("cpu", [2, 3, 4, 5])
    readers = [
        steps(source, PlacementList([R]), target, PlacementList([S0]), (8, 2), torch.float32, d)[0].terms[0][0].device
        for d in target.device_ids
    ]
    assert sorted(readers) == [0, 0, 1, 1]
    moved = moved_bytes(source, PlacementList([R]), target, PlacementList([S0]), (8, 2), torch.float32)
    assert moved == {0: 0, 1: 0, 2: 16, 3: 16, 4: 16, 5: 16}


def test_a_mesh_reshaped_moves_nothing():
    flat, square = init_device_mesh("cpu", 4), init_device_mesh("cpu", (2, 2))
    problem = flat, PlacementList([S0]), square, PlacementList([S0, S0]), (8, 2)
    assert sum(moved_bytes(*problem, torch.float32).values()) == 0
    assert steps(*problem, torch.float32, 3)[0].group == (3,)


def test_pairs_of_meshes_are_separate_groups():
    source, target = init_device_mesh("cpu", 2), DeviceMesh("cpu", [2, 3])
    (part,) = steps(source, PlacementList([S0]), target, PlacementList([S0]), (8, 2), torch.float32, 3)
    assert part.group == (1, 3)


def test_unlike_reductions_are_refused():
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ValueError, match="different kinds"):
        steps(mesh, PlacementList([P, partial("max")]), mesh, PlacementList([R, R]), (4,), torch.float32, 0)
    with pytest.raises(ValueError, match="only sums"):
        steps(mesh, PlacementList([R, R]), mesh, PlacementList([R, partial("max")]), (4,), torch.float32, 0)


def test_a_device_of_neither_mesh_does_nothing():
    mesh = init_device_mesh("cpu", 2)
    assert steps(mesh, PlacementList([S0]), mesh, PlacementList([R]), (4,), torch.float32, 7) == ()


def test_large_meshes_plan_only_what_they_read():
    mesh = init_device_mesh("cpu", (54, 8))
    source, target = PlacementList([S0, P]), PlacementList([S0, R])
    for device in mesh.device_ids:
        (part,) = steps(mesh, source, mesh, target, (4, 4), torch.float32, device)
        assert len(part.group) in (1, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replicas_get_the_same_bits(dtype):
    """Sums are taken in the order of coordinates, of one phase or two; narrow ones are rounded once."""
    mesh = init_device_mesh("cpu", 5)
    for shape in ((7,), (60, 50)):
        parts = {d: torch.randn(shape).to(dtype) for d in mesh.device_ids}
        expected = sum((parts[d].float() for d in range(1, 5)), parts[0].float()).to(dtype)
        results = run(mesh, PlacementList([P]), mesh, PlacementList([R]), shape, parts, dtype)
        assert all(torch.equal(result, expected) for result in results.values())
