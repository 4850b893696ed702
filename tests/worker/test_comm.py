"""Transfers through shared memory, between real processes, against plain torch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import select
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import PARTIAL, PlacementList, partial, shard
from dtorch.placement import REPLICATE as R
from dtorch.sharding.layout import local_box
from dtorch.sharding.transfer import Transfer, steps
from dtorch.worker.comm import all_reduce, prepared, shared, streams
from dtorch.worker.comm.arena import Arena, Region, create_segment
from dtorch.worker.comm.control import CREDIT, Control
from dtorch.worker.comm.process_groups import ProcessGroups
from dtorch.worker.comm.shared import SharedMemory
from dtorch.worker.comm.sockets import gloo
from dtorch.worker.poison import Poison

SECONDS = 60
DEVICES = 4


def run_forked(devices: list[int], work: Callable[[int, SharedMemory], None], limit: int | None = None) -> None:
    """Run ``work(device, communicator)`` in a process per device; fail with what failed there. ``limit``: of each arena."""
    fd = create_segment(DEVICES)
    read, write = os.pipe()
    pids = {}
    for device in devices:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                work(device, SharedMemory(fd, Control(fd, DEVICES), device, limit))
                status = 0
            except BaseException:
                os.write(write, traceback.format_exc().encode())
            finally:
                os._exit(status)
        pids[device] = pid
    os.close(write)
    failed = [device for device, pid in pids.items() if _status(pid, SECONDS)]
    with os.fdopen(read) as text:
        report = text.read()
    os.close(fd)
    assert not failed, f"devices {failed}: {report}"


def _status(pid: int, seconds: float) -> int:
    fd = os.pidfd_open(pid)
    try:
        if not select.select([fd], [], [], seconds)[0]:
            os.kill(pid, 9)
    finally:
        os.close(fd)
    return os.waitpid(pid, 0)[1]


def exchange(
    communicator: SharedMemory, step: Transfer, value: torch.Tensor | Poison | None
) -> torch.Tensor | Poison | None:
    return communicator.transfer(step, value, sequence=5)


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-8, 8, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(made.double(), torch.randint(-8, 8, shape, generator=generator).double()).to(dtype)
    return made.to(dtype)


def split(mesh: DeviceMesh, placements: PlacementList, tensor: torch.Tensor, device: int) -> torch.Tensor | None:
    """What ``device`` holds of ``tensor``; an addend along a Partial axis is the tensor times (coordinate + 1)."""
    here = mesh.coordinate(device)
    if here is None:
        return None
    box = local_box(placements, mesh.shape, here, tensor.shape)
    local = tensor[tuple(slice(*edge) for edge in box)].clone()
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            local = local * (here[axis] + 1)
    return local


def total(mesh: DeviceMesh, placements: PlacementList, tensor: torch.Tensor) -> torch.Tensor:
    """The value that those addends stand for."""
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement == PARTIAL:
            tensor = tensor * (size * (size + 1) // 2)
        elif placement == partial("max"):
            tensor = torch.maximum(tensor, tensor * size)
    return tensor


PAIR = DeviceMesh("cpu", [0, 1])
LINE = DeviceMesh("cpu", [0, 1, 2])
SQUARE = DeviceMesh("cpu", [[0, 1], [2, 3]])
TURNED = DeviceMesh("cpu", [3, 1, 0, 2])
OTHER = DeviceMesh("cpu", [2, 3])
CASES = [
    (PAIR, [shard(0)], PAIR, [R]),
    (PAIR, [shard(0)], PAIR, [shard(1)]),
    (PAIR, [PARTIAL], PAIR, [R]),
    (PAIR, [PARTIAL], PAIR, [shard(0)]),
    (LINE, [PARTIAL], LINE, [R]),
    (LINE, [PARTIAL], LINE, [shard(1)]),
    (LINE, [partial("max")], LINE, [R]),
    (LINE, [shard(0)], LINE, [shard(1)]),
    (LINE, [shard(1)], LINE, [R]),
    (SQUARE, [shard(0), shard(0)], SQUARE, [R, R]),
    (SQUARE, [shard(0), shard(1)], SQUARE, [shard(1), shard(0)]),
    (SQUARE, [PARTIAL, shard(0)], SQUARE, [shard(0), R]),
    (SQUARE, [PARTIAL, PARTIAL], SQUARE, [R, R]),
    (SQUARE, [R, shard(1)], SQUARE, [shard(0), R]),
    (PAIR, [shard(0)], OTHER, [shard(1)]),
    (PAIR, [PARTIAL], OTHER, [R]),
    (SQUARE, [shard(0), R], PAIR, [shard(0)]),
    (SQUARE, [shard(0), shard(1)], TURNED, [shard(1)]),
    (LINE, [shard(0)], TURNED, [R]),
]
SHAPES = [
    ((5, 7), torch.float32),
    ((1, 2), torch.int64),
    ((0, 3), torch.float32),
    ((130, 67), torch.bfloat16),
    ((4, 4, 3), torch.complex64),
]


Carry = Callable[[Transfer, "torch.Tensor | Poison | None"], "torch.Tensor | Poison | None"]


def check_every_case(device: int, carry: Carry, times: int = 1) -> None:
    """Do the device's part of every transfer by ``carry(transfer, value)``, and compare with plain torch. ``times``: with other values."""
    for time, (shape, dtype) in itertools.product(range(times), SHAPES):
        for number, (source_mesh, source, target_mesh, target) in enumerate(CASES):
            if dtype.is_complex and partial("max") in source:
                continue
            before, after = PlacementList(source), PlacementList(target)
            tensor = whole(shape, dtype, seed=number + 100 * time)
            value: torch.Tensor | Poison | None = split(source_mesh, before, tensor, device)
            for step in steps(source_mesh, before, target_mesh, after, shape, dtype, device):
                value = carry(step, value)
            if target_mesh.coordinate(device) is None:
                assert value is None
                continue
            expected = split(target_mesh, after, total(source_mesh, before, tensor), device)
            assert isinstance(value, torch.Tensor), (device, value)
            assert value.is_contiguous()
            assert torch.equal(value, expected), (device, shape, source, target, value, expected)


def test_every_transfer_gives_what_plain_torch_gives() -> None:
    run_forked(
        [0, 1, 2, 3],
        lambda device, communicator: check_every_case(device, functools.partial(exchange, communicator), times=3),
    )


def test_every_transfer_of_what_others_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all but the smallest are published; in slots where other values were before."""
    monkeypatch.setattr(prepared, "_SMALL_BYTES", 0)
    run_forked(
        [0, 1, 2, 3],
        lambda device, communicator: check_every_case(device, functools.partial(exchange, communicator), times=3),
    )


def test_every_transfer_while_values_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large ones do: a few numbers at a time, read while the next ones are copied in."""
    monkeypatch.setattr(shared, "GROWING_BYTES", 1)
    monkeypatch.setattr(streams, "_GROWN_BYTES", 48)

    def work(device: int, communicator: SharedMemory) -> None:
        check_every_case(device, functools.partial(exchange, communicator))
        if device == 3:
            return
        poison, shape = Poison((1, 77)), (30, 5)
        (step,) = steps(LINE, PlacementList([shard(0)]), LINE, PlacementList([R]), shape, torch.float32, device)
        assert exchange(communicator, step, poison if device == 1 else torch.ones(10, 5)) == poison
        for layout in laid_out(torch.full((10, 5), float(device))):
            expected = torch.arange(3.0).repeat_interleave(10)[:, None].expand(shape)
            assert torch.equal(exchange(communicator, dataclasses.replace(step), layout), expected)

    run_forked([0, 1, 2, 3], work)


def laid_out(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The same values in other layouts."""
    spread = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)[..., ::2]
    conj = tensor.conj().resolve_conj().conj()
    assert conj.is_conj() == tensor.is_complex()
    layouts = [tensor, tensor.t().contiguous().t(), spread.copy_(tensor), conj]
    return layouts if tensor.dtype is torch.bool else [*layouts, torch._neg_view(tensor.neg())]


@pytest.mark.parametrize("small", [1 << 14, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.float16, torch.int8], ids=str)
def test_a_transfer_that_is_prepared(dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second time on: values of any layout, poisons between them, and many in a row."""
    monkeypatch.setattr(prepared, "_SMALL_BYTES", small)
    poison = Poison((1, 77))

    def work(device: int, communicator: SharedMemory) -> None:
        for source, target in (
            ([PARTIAL], [R]),
            ([PARTIAL], [shard(0)]),
            ([shard(0)], [R]),
            ([shard(0)], [shard(1)]),
            ([shard(1)], [shard(0)]),
        ):
            if source == [PARTIAL] and dtype is torch.bool:
                source = [partial("or")]
            before, after = PlacementList(source), PlacementList(target)
            (step,) = steps(LINE, before, LINE, after, (7, 5), dtype, device)
            for time in range(25):
                tensor = whole((7, 5), dtype, seed=time)
                own = split(LINE, before, tensor, device)
                assert own is not None
                expected = split(LINE, after, total(LINE, before, tensor), device)
                for value in laid_out(own.to(dtype)):
                    found = exchange(communicator, step, value)
                    assert isinstance(found, torch.Tensor)
                    assert found.dtype is dtype
                    assert found.is_contiguous()
                    assert torch.equal(found, expected.to(dtype)), (device, source, target, time)  # type: ignore[union-attr]
                if time % 3 == 0:
                    assert exchange(communicator, step, poison if device == 1 else own.to(dtype)) == poison

    run_forked([0, 1, 2], work)


def test_process_groups_give_the_same(tmp_path: Path) -> None:
    def work(device: int, own: SharedMemory) -> None:
        communicator = ProcessGroups(own._fd, own._control, device, str(tmp_path), gloo, torch.device("cpu"))

        def carry(step: Transfer, value: torch.Tensor | Poison | None) -> torch.Tensor | Poison | None:
            return communicator.transfer(dataclasses.replace(step, source_type="cuda", target_type="cuda"), value, 0)

        check_every_case(device, carry)
        (step,) = steps(
            SQUARE, PlacementList([PARTIAL, PARTIAL]), SQUARE, PlacementList([R, R]), (3,), torch.int64, device
        )
        on_cuda = dataclasses.replace(step, source_type="cuda", target_type="cuda")
        poison = Poison((2, 11))
        assert communicator.transfer(on_cuda, poison if device == 2 else torch.ones(3, dtype=torch.int64), 0) == poison

    run_forked([0, 1, 2, 3], work)


def test_many_collectives_in_a_row_reuse_the_same_memory() -> None:
    def work(device: int, communicator: SharedMemory) -> None:
        (step,) = steps(PAIR, PlacementList([PARTIAL]), PAIR, PlacementList([R]), (256,), torch.float32, device)
        for number in range(3000):
            result = exchange(communicator, step, torch.full((256,), float(number * (device + 1))))
            assert result[0] == result[255] == 3.0 * number
        assert communicator._arena._end <= (CREDIT + 2) * 4096

    run_forked([0, 1], work)


def test_large_tensors_and_strided_ones() -> None:
    def work(device: int, communicator: SharedMemory) -> None:
        shape = (3000, 7001)  # 84 MB: more than one window
        tensor = torch.arange(3000 * 7001, dtype=torch.float32).reshape(7001, 3000).t()
        (step,) = steps(PAIR, PlacementList([shard(0)]), PAIR, PlacementList([shard(1)]), shape, torch.float32, device)
        for _ in range(2):
            local = tensor.chunk(2, 0)[device]
            assert torch.equal(exchange(communicator, step, local), tensor.chunk(2, 1)[device])

    run_forked([0, 1], work)


def test_a_send_needs_no_reader_within_the_credit() -> None:
    ready, go = os.pipe()

    def work(device: int, communicator: SharedMemory) -> None:
        (step,) = steps(
            DeviceMesh("cpu", [0]), PlacementList([R]), DeviceMesh("cpu", [1]), PlacementList([R]), (3,), torch.float32, device
        )  # fmt: skip
        if device == 0:
            for number in range(CREDIT):
                exchange(communicator, step, torch.full((3,), float(number)))
            os.write(go, b"x")  # not reached if a send waited for device 1, which waits for this
            for number in range(CREDIT, 40):
                exchange(communicator, step, torch.full((3,), float(number)))
        else:
            assert os.read(ready, 1) == b"x"
            for number in range(40):
                assert torch.equal(exchange(communicator, step, None), torch.full((3,), float(number)))

    run_forked([0, 1], work)
    os.close(ready)
    os.close(go)


def test_poison_travels_with_the_value() -> None:
    poison = Poison((1, 77))

    def work(device: int, communicator: SharedMemory) -> None:
        (step,) = steps(LINE, PlacementList([PARTIAL]), LINE, PlacementList([R]), (8,), torch.float32, device)
        assert exchange(communicator, step, poison if device == 1 else torch.ones(8)) == poison
        assert torch.equal(exchange(communicator, step, torch.ones(8)), torch.full((8,), 3.0))

    run_forked([0, 1, 2], work)


def test_what_cannot_be_sent_poisons_only_the_receivers_result() -> None:
    shape = (1,) * 40

    def work(device: int, communicator: SharedMemory) -> None:
        (step,) = steps(PAIR, PlacementList([PARTIAL]), PAIR, PlacementList([R]), shape, torch.float32, device)
        if device == 0:
            with pytest.raises(ValueError, match="40 dims"):
                exchange(communicator, step, torch.ones(shape))
        else:
            assert exchange(communicator, step, Poison((9, 9))) == Poison((0, 5))

    run_forked([0, 1], work)


def test_poison_reaches_only_those_who_read_it() -> None:
    poison = Poison((1, 77))

    def work(device: int, communicator: SharedMemory) -> None:
        (step,) = steps(PAIR, PlacementList([shard(0)]), OTHER, PlacementList([shard(0)]), (4,), torch.float32, device)
        result = exchange(communicator, step, {0: torch.ones(2), 1: poison}.get(device))
        if device == 2:
            assert torch.equal(result, torch.ones(2))
        if device == 3:
            assert result == poison

    run_forked([0, 1, 2, 3], work)


def test_an_arena_uses_freed_blocks_again_and_gives_large_ones_back() -> None:
    fd = create_segment(1)
    region = Region(fd, 2)
    arena = Arena(region)
    first = arena.allocate(5000)
    region.bytes(first, 5000).fill_(7)
    second = arena.allocate(5000)
    assert second != first
    arena.free(first)
    assert arena.allocate(8000) == first
    size = 300 << 20
    blocks = [arena.allocate(size), arena.allocate(size)]
    for block in blocks:
        region.bytes(block, 4096).fill_(1)
    for block in blocks:
        arena.free(block)
    assert [int(region.bytes(block, 4096).max()) for block in blocks] == [1, 0]
    assert int(region.bytes(first, 5000).max()) == 7
    os.close(fd)


@pytest.mark.parametrize("ndim", [0, 12])
def test_any_number_of_dims(ndim: int) -> None:
    def work(device: int, communicator: SharedMemory) -> None:
        shape = (1,) * ndim
        (step,) = steps(PAIR, PlacementList([PARTIAL]), PAIR, PlacementList([R]), shape, torch.float32, device)
        result = exchange(communicator, step, torch.full(shape, float(device + 1)))
        assert torch.equal(result, torch.full(shape, 3.0))

    run_forked([0, 1], work)


@pytest.fixture
def in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """All-reduces in shares of smaller values than is fast."""
    monkeypatch.setattr(all_reduce, "_SHARED_OUT", (1 << 17, 1 << 15))


@pytest.mark.usefixtures("in_shares")
@pytest.mark.parametrize("members", [2, 3, 4])
def test_an_all_reduce_in_shares(members: int) -> None:
    """Of several chunks, uneven shares, strided addends; what it gave is not touched by the next ones."""
    mesh = DeviceMesh("cpu", list(range(members)))

    def work(device: int, communicator: SharedMemory) -> None:
        held = []
        for dtype in (torch.float32, torch.bfloat16, torch.complex64, torch.uint8):
            for op in ("sum", "max") if not dtype.is_complex else ("sum",):
                for shape in ((1021, 1031), (313, 1024)):
                    (step,) = steps(mesh, PlacementList([partial(op)]), mesh, PlacementList([R]), shape, dtype, device)
                    assert step.is_all_reduce
                    addends = [whole(shape, dtype, seed) for seed in range(members)]
                    expected = addends[0].float() if dtype is torch.bfloat16 else addends[0]
                    for addend in addends[1:]:
                        expected = expected + addend if op == "sum" else torch.maximum(expected, addend)
                    value = addends[device].t().contiguous().t() if shape[0] == 313 else addends[device]
                    kept = value.clone()
                    result = exchange(communicator, step, value)
                    assert isinstance(result, torch.Tensor)
                    assert result.is_contiguous()
                    assert torch.equal(result, expected.to(dtype)), (dtype, op, shape)
                    assert torch.equal(value, kept)
                    held.append((result, expected.to(dtype)))
        assert all(torch.equal(result, expected) for result, expected in held)
        held.clear()
        result = None
        assert not communicator._arena._sizes  # all its blocks are free again

    run_forked(list(range(members)), work)


@pytest.mark.usefixtures("in_shares")
def test_poison_in_an_all_reduce_in_shares() -> None:
    poison = Poison((1, 77))
    shape = (1 << 18,)

    def work(device: int, communicator: SharedMemory) -> None:
        (step,) = steps(LINE, PlacementList([PARTIAL]), LINE, PlacementList([R]), shape, torch.float32, device)
        assert exchange(communicator, step, poison if device == 1 else torch.ones(shape)) == poison
        assert torch.equal(exchange(communicator, step, torch.ones(shape)), torch.full(shape, 3.0))
        if device == 2:
            with pytest.raises(ValueError, match="planned"):
                exchange(communicator, step, torch.ones(5))
        else:
            assert exchange(communicator, step, torch.ones(shape)) == Poison((2, 5))
        assert torch.equal(exchange(communicator, step, torch.ones(shape)), torch.full(shape, 3.0))

    run_forked([0, 1, 2], work)


@pytest.mark.usefixtures("in_shares")
@pytest.mark.parametrize(("op", "dtype"), [("product", torch.float16), ("min", torch.int32), ("and", torch.bool)])
def test_other_reductions(op: str, dtype: torch.dtype) -> None:
    def work(device: int, communicator: SharedMemory) -> None:
        for size in (40, 1 << 18):
            (step,) = steps(LINE, PlacementList([partial(op)]), LINE, PlacementList([R]), (size,), dtype, device)
            addends = [whole((size,), dtype, seed) for seed in range(3)]
            first, second, third = addends
            if op == "product":
                expected = (first.float() * second * third).to(dtype)
            else:
                combine = torch.minimum if op == "min" else torch.logical_and
                expected = combine(combine(first, second), third)
            assert torch.equal(exchange(communicator, step, addends[device]), expected)

    run_forked([0, 1, 2], work)


@pytest.mark.parametrize("members", [2, 3])
def test_what_is_computed_in_shared_memory_is_not_copied_in(members: int) -> None:
    mesh = DeviceMesh("cpu", list(range(members)))

    def work(device: int, communicator: SharedMemory) -> None:
        for shape in ((5, 7), (700, 1000)):
            addends = [whole(shape, torch.float32, seed) for seed in range(members)]
            total = sum(addends[1:], addends[0])
            for target in (R, shard(0), R):
                (step,) = steps(
                    mesh, PlacementList([PARTIAL]), mesh, PlacementList([target]), shape, torch.float32, device
                )
                made = communicator.empty(shape, torch.float32).copy_(addends[device])
                place = made.data_ptr()
                result = exchange(communicator, step, made)
                box = local_box(PlacementList([target]), mesh.shape, (device,), shape)
                expected = total[slice(*box[0])]
                assert torch.equal(result, expected)
                assert (result.data_ptr() == place) == (target is R and shape[0] == 700)
                if target is R:
                    assert torch.equal(exchange(communicator, step, result), total * members)
                    assert torch.equal(result, total)  # a result is no addend to be overwritten
                del made, result
        poison = Poison((0, 3))
        (step,) = steps(mesh, PlacementList([PARTIAL]), mesh, PlacementList([R]), (700, 1000), torch.float32, device)
        made = communicator.empty((700, 1000), torch.float32)
        assert exchange(communicator, step, poison if device == 0 else made) == poison
        del made
        exchange(communicator, step, torch.ones(700, 1000))
        communicator._sent.free_read()
        assert not communicator._sent._made_here

    run_forked(list(range(members)), work)
