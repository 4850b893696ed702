"""Values larger than the arena pass through it slab by slab, and give what plain torch gives."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import PARTIAL, REDUCE_OPS, PlacementList, partial, shard
from dtorch.placement import REPLICATE as R
from dtorch.sharding.rearrange import Shift
from dtorch.sharding.transfer import Half, steps
from dtorch.worker.comm.arena import Arena, Region, create_segment
from dtorch.worker.comm.shared import SharedMemory
from dtorch.worker.comm.streams import Slabs
from dtorch.worker.poison import Poison

from .test_comm import CASES, LINE, OTHER, PAIR, SQUARE, run_forked, split, total, whole

LIMIT = 1 << 16
#: Of 100 KB and more where the dtype has 4 bytes; even, uneven, with empty shards, of many dims, with one large dim in the middle.
SHAPES = [(256, 128), (131, 203), (2, 14001), (1, 3, 9001, 2), (26001,)]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.uint8, torch.int64, torch.bool,
]  # fmt: skip
MESHES = {2: PAIR, 3: LINE, 4: DeviceMesh("cpu", [0, 1, 2, 3])}


def move(communicator: SharedMemory, device: int, case: tuple, tensor: torch.Tensor, value: object) -> object:
    source_mesh, source, target_mesh, target = case
    for step in steps(
        source_mesh,
        PlacementList(source),
        target_mesh,
        PlacementList(target),
        tuple(tensor.shape),
        tensor.dtype,
        device,
    ):
        value = communicator.transfer(step, value, 5)  # type: ignore[arg-type]
    return value


def test_every_transfer_through_a_small_arena() -> None:
    def work(device: int, communicator: SharedMemory) -> None:
        for number, case in enumerate(CASES):
            for shape, dtype in (
                (SHAPES[number % 3], torch.float32),
                ((401, 67), torch.complex64),
                ((0, 3), torch.float32),
            ):
                source_mesh, source, target_mesh, target = case
                if dtype.is_complex and partial("max") in source:
                    continue
                tensor = whole(shape, dtype, seed=number)
                value = split(source_mesh, PlacementList(source), tensor, device)
                found = move(communicator, device, case, tensor, value)
                if target_mesh.coordinate(device) is None:
                    assert found is None
                    continue
                after = total(source_mesh, PlacementList(source), tensor)
                expected = split(target_mesh, PlacementList(target), after, device)
                assert torch.equal(found, expected), (device, shape, case)  # type: ignore[arg-type]
        assert communicator._arena._used <= LIMIT

    run_forked([0, 1, 2, 3], work, LIMIT)


@pytest.mark.parametrize("members", MESHES)
def test_every_dtype_and_shape(members: int) -> None:
    mesh = MESHES[members]
    first = DeviceMesh("cpu", [0])
    last = DeviceMesh("cpu", [members - 1])

    def work(device: int, communicator: SharedMemory) -> None:
        for number, dtype in enumerate(DTYPES):
            shape = SHAPES[(number + members) % len(SHAPES)]
            tensor = whole(shape, dtype)
            dim = max(range(len(shape)), key=shape.__getitem__)
            for case in (
                (mesh, [shard(dim)], mesh, [R]),
                (mesh, [shard(0)], mesh, [shard(len(shape) - 1)]),
                (first, [R], mesh, [R]),
                (first, [R], last, [R]),
                (mesh, [PARTIAL], mesh, [R]),
                (mesh, [PARTIAL], mesh, [shard(dim)]),
            ):
                source_mesh, source, target_mesh, target = case
                if PARTIAL in source and dtype is torch.bool:
                    continue
                value = split(source_mesh, PlacementList(source), tensor, device)
                found = move(communicator, device, case, tensor, value)
                if target_mesh.coordinate(device) is not None:
                    after = total(source_mesh, PlacementList(source), tensor)
                    expected = split(target_mesh, PlacementList(target), after, device)
                    assert torch.equal(found, expected), (device, shape, dtype, case)  # type: ignore[arg-type]

    run_forked(list(range(members)), work, LIMIT)


@pytest.mark.parametrize("op", REDUCE_OPS)
def test_every_reduction(op: str) -> None:
    """Of three addends, so that an order and a rounding in between would show."""
    combine = {
        "sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum, "and": torch.logical_and,
        "or": torch.logical_or,
    }[op]  # fmt: skip
    dtypes = [torch.bool] if op in ("and", "or") else [torch.float32, torch.bfloat16, torch.int32]

    def work(device: int, communicator: SharedMemory) -> None:
        for dtype in dtypes:
            addends = [whole((131, 1203), dtype, seed) for seed in range(3)]
            wide = [a.float() if dtype is torch.bfloat16 else a for a in addends]
            expected = combine(combine(wide[0], wide[1]), wide[2]).to(dtype)
            for target in (R, shard(1)):
                case = LINE, [partial(op)], LINE, [target]
                found = move(communicator, device, case, addends[0], addends[device].t().contiguous().t())
                assert torch.equal(found, split(LINE, PlacementList([target]), expected, device))  # type: ignore[arg-type]

    run_forked([0, 1, 2], work, LIMIT)


def test_results_that_live_on_leave_room() -> None:
    """All-reduces put their results into the arena while they are few; `empty` makes tensors elsewhere then."""

    def work(device: int, communicator: SharedMemory) -> None:
        held = []
        for number in range(12):
            tensor = whole((150, 160), torch.float32, number)
            made = communicator.empty(tensor.shape, tensor.dtype).copy_(tensor * (device + 1))
            held += [(move(communicator, device, (PAIR, [PARTIAL], PAIR, [R]), tensor, made), tensor * 3)]
            tensor = whole((200, 200), torch.float32, number)
            value = tensor * (device + 1)
            held += [(move(communicator, device, (PAIR, [PARTIAL], PAIR, [R]), tensor, value), tensor * 3)]
        assert all(torch.equal(found, expected) for found, expected in held)  # type: ignore[arg-type]
        assert communicator._arena._used <= LIMIT << 2
        held.clear()
        made = value = None  # type: ignore[assignment]
        communicator._sent.await_readers(len(communicator._sent.waiting))
        assert communicator._arena._used == LIMIT  # the window, a quarter

    run_forked([0, 1], work, LIMIT << 2)


def test_poison_and_failures() -> None:
    poison = Poison((1, 77))
    shape = (300, 301)

    def work(device: int, communicator: SharedMemory) -> None:
        tensor = whole(shape, torch.float32)
        for case in (
            (LINE, [PARTIAL], LINE, [R]),
            (LINE, [shard(0)], LINE, [R]),
            (LINE, [shard(0)], LINE, [shard(1)]),
            (LINE, [PARTIAL], LINE, [shard(0)]),
        ):
            value = split(LINE, PlacementList(case[1]), tensor, device)
            found = move(communicator, device, case, tensor, poison if device == 1 else value)
            assert found == poison
            after = split(LINE, PlacementList(case[3]), total(LINE, PlacementList(case[1]), tensor), device)
            assert torch.equal(move(communicator, device, case, tensor, value), after)  # type: ignore[arg-type]
        # One of which another shape was planned: where its reader finds no such box, that one alone fails.
        case = (LINE, [shard(0)], LINE, [R])
        value = torch.ones(99, 301) if device == 2 else split(LINE, PlacementList([shard(0)]), tensor, device)
        if device == 2:
            with pytest.raises(RuntimeError):
                move(communicator, device, case, tensor, value)
        else:
            with pytest.raises(ValueError, match=r"without the box"):
                move(communicator, device, case, tensor, value)
        case = (LINE, [PARTIAL], LINE, [R])
        value = split(LINE, PlacementList([PARTIAL]), tensor, device)
        assert torch.equal(move(communicator, device, case, tensor, value), tensor * 6)  # type: ignore[arg-type]

    run_forked([0, 1, 2], work, LIMIT)


def test_some_stream_and_some_do_not() -> None:
    """Uneven shards: one fits, others do not, one is empty. A group in which not all read what is published."""

    def work(device: int, communicator: SharedMemory) -> None:
        for shape in ((3, 9001), (5, 9001), (9, 9001)):
            tensor = whole(shape, torch.float32)
            for source, target in ((shard(0), R), (shard(0), shard(1)), (shard(1), shard(0))):
                mesh = MESHES[4]
                value = split(mesh, PlacementList([source]), tensor, device)
                found = move(communicator, device, (mesh, [source], mesh, [target]), tensor, value)
                assert torch.equal(found, split(mesh, PlacementList([target]), tensor, device))  # type: ignore[arg-type]
            for case in (
                (SQUARE, [shard(0), R], PAIR, [shard(1)]),
                (PAIR, [shard(1)], OTHER, [shard(0)]),
                (SQUARE, [shard(1), shard(1)], PAIR, [shard(1)]),
            ):
                value = split(case[0], PlacementList(case[1]), tensor, device)
                found = move(communicator, device, case, tensor, value)
                expected = split(case[2], PlacementList(case[3]), tensor, device)
                assert found is None if expected is None else torch.equal(found, expected)  # type: ignore[arg-type]

    run_forked([0, 1, 2, 3], work, LIMIT)


def test_halves_and_shifts() -> None:
    """What has begun is what ends, though the tensor is written in between."""

    def work(device: int, communicator: SharedMemory) -> None:
        for shape in ((300, 400), (20, 30)):
            tensors = [whole(shape, torch.float32, seed) for seed in range(3)]
            begun = []
            for tensor, (source, target) in zip(
                tensors, ((PARTIAL, R), (shard(0), R), (shard(1), shard(0))), strict=True
            ):
                before = PlacementList([source])
                (step,) = steps(PAIR, before, PAIR, PlacementList([target]), shape, torch.float32, device)
                value = split(PAIR, before, tensor, device)
                assert communicator.carry(Half(step, True), value, 5) is None
                begun.append((step, value, split(PAIR, PlacementList([target]), total(PAIR, before, tensor), device)))
            for step, value, expected in begun:
                found = communicator.carry(Half(step, False), value, 6)
                assert torch.equal(found, expected)  # type: ignore[arg-type]
            for value in (tensors[device], tensors[device][:1, :5]):
                hop = Shift(device, 1 - device, 1 - device, torch.float32, "cpu", starts=True)
                sent = value.clone()
                communicator.carry(hop, sent, 7)
                sent.zero_()
                found = communicator.carry(dataclasses.replace(hop, starts=False), None, 7)
                assert torch.equal(found, tensors[1 - device][: len(value), : value.shape[1]])  # type: ignore[arg-type]
        hop = Shift(device, 1 - device, 1 - device, torch.float32, "cpu", starts=True)
        communicator.carry(hop, Poison((0, 3)) if device == 0 else torch.ones(300, 300), 7)
        found = communicator.carry(dataclasses.replace(hop, starts=False), None, 7)
        assert found == Poison((0, 3)) if device else torch.equal(found, torch.ones(300, 300))  # type: ignore[arg-type]

    run_forked([0, 1], work, LIMIT)


def test_slabs_cover_a_tensor() -> None:
    for shape in ((), (1,), (7,), (3, 5), (2, 3, 11), (4, 1, 9, 2), (1, 1)):
        for elements in (1, 2, 5, 12, 100):
            slabs = Slabs(shape, elements)
            seen = torch.zeros(shape, dtype=torch.int64)
            for step in range(1, slabs.count + 1):
                box = seen[tuple(slice(*edge) for edge in slabs.box(step))]
                assert 0 < box.numel() <= elements
                box += 1
            assert bool((seen == 1).all())


def test_an_arena_keeps_to_its_limit() -> None:
    fd = create_segment(1)
    arena = Arena(Region(fd, 2), LIMIT)
    blocks = [arena.allocate(4096) for _ in range(8)]
    assert arena.fits(LIMIT // 2)
    assert not arena.fits(LIMIT // 2 + 1)
    arena.region.bytes(blocks[0], 4096).fill_(1)
    for block in blocks:
        arena.free(block)
    large = arena.allocate(LIMIT)  # those that were kept are given up for it
    assert arena._used + arena._idle == LIMIT
    assert int(arena.region.bytes(blocks[0], 4096).max()) == 0
    with pytest.raises(MemoryError, match="65536"):
        arena.allocate(1)
    arena.free(large)
    assert arena.allocate(LIMIT - 1) == large
    os.close(fd)
