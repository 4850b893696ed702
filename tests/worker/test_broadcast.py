"""Broadcasts whose owner keeps, as its result, what the others have read."""

from __future__ import annotations

import functools
import time

import pytest
import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import REPLICATE as R
from dtorch.placement import PlacementList, shard
from dtorch.sharding.transfer import Half, Transfer, steps
from dtorch.worker.comm import broadcast, prepared, shared, streams
from dtorch.worker.comm.shared import SharedMemory
from dtorch.worker.poison import Poison

from .test_comm import LINE, PAIR, SQUARE, check_every_case, exchange, laid_out, run_forked, whole

FIRST, SECOND = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
MESHES = {2: PAIR, 3: LINE, 4: SQUARE}
SHAPES = [(1,), (7, 5), (3, 1, 4, 2)]
DTYPES = [torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.int8, torch.float64]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broadcasts of values that are smaller than is fast, which grow by a few numbers."""
    monkeypatch.setattr(broadcast, "_LEAST_BYTES", (1, 1))
    monkeypatch.setattr(prepared, "MOST_BYTES", 0)
    monkeypatch.setattr(shared, "GROWING_BYTES", 1)
    monkeypatch.setattr(streams, "_GROWN_BYTES", 48)


def planned(
    source: DeviceMesh, target: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype, device: int
) -> Transfer:
    (step,) = steps(source, PlacementList([R]), target, PlacementList([R] * target.ndim), shape, dtype, device)
    return step


def is_in_arena(communicator: SharedMemory, tensor: torch.Tensor) -> bool:
    """Whether it is in a block that was made for a tensor which lives on."""
    window = communicator._arena.region._window
    start = torch.frombuffer(window, dtype=torch.uint8, count=1).data_ptr()
    return tensor.data_ptr() - start in communicator._arena._sizes


@pytest.mark.parametrize("members", MESHES)
def test_any_value(members: int) -> None:
    """Of any layout, again and again; whoever got a result may write to it at once, and the value stays what it was."""

    def work(device: int, communicator: SharedMemory) -> None:
        for shape in SHAPES:
            for dtype in DTYPES:
                step = planned(FIRST, MESHES[members], shape, dtype, device)
                assert broadcast.is_broadcast(step) == (device == 0)
                for seed in range(3):
                    tensor = whole(shape, dtype, seed)
                    for value in laid_out(tensor) if len(shape) == 2 else [tensor]:
                        found = exchange(communicator, step, value if device == 0 else None)
                        assert isinstance(found, torch.Tensor)
                        assert found.is_contiguous()
                        assert not found.is_conj()
                        assert not found.is_neg()
                        assert torch.equal(found, tensor), (device, shape, dtype, seed)
                        if device == 0:
                            assert is_in_arena(communicator, found)
                            found.zero_()
                            assert torch.equal(value, tensor)
                        del found
        communicator._sent.free_read()
        assert not communicator._arena._sizes

    run_forked(list(range(members)), work)


def test_every_other_transfer() -> None:
    """Among them shards that are the whole, as the others are empty."""
    run_forked(
        [0, 1, 2, 3],
        lambda device, communicator: check_every_case(device, functools.partial(exchange, communicator), times=2),
    )


def test_a_shard_that_is_all_there_is() -> None:
    def work(device: int, communicator: SharedMemory) -> None:
        tensor = whole((1, 40), torch.float32)
        (step,) = steps(LINE, PlacementList([shard(0)]), LINE, PlacementList([R]), (1, 40), torch.float32, device)
        for _ in range(3):
            found = exchange(communicator, step, tensor if device == 0 else torch.empty(0, 40))
            assert torch.equal(found, tensor)  # type: ignore[arg-type]
            assert device or is_in_arena(communicator, found)  # type: ignore[arg-type]

    run_forked([0, 1, 2], work)


def test_two_owners_in_one_transfer() -> None:
    """Each replica of the source is read by one device that holds none."""

    def work(device: int, communicator: SharedMemory) -> None:
        tensor = whole((9, 4), torch.float32)
        for _ in range(20):
            found = exchange(communicator, planned(PAIR, SQUARE, (9, 4), torch.float32, device), tensor)
            assert torch.equal(found, tensor)  # type: ignore[arg-type]
            found.zero_()  # type: ignore[union-attr]

    run_forked([0, 1, 2, 3], work)


def test_the_owner_waits_for_a_late_reader() -> None:
    """The result is written to at once, and what is read is what was sent."""

    def work(device: int, communicator: SharedMemory) -> None:
        tensor = whole((300, 7), torch.float32)
        step = planned(FIRST, LINE, (300, 7), torch.float32, device)
        for late in range(3):
            if device == late:
                time.sleep(0.1)
            found = exchange(communicator, step, tensor if device == 0 else None)
            assert torch.equal(found, tensor)  # type: ignore[arg-type]
            found.fill_(-1)  # type: ignore[union-attr]

    run_forked([0, 1, 2], work)


def test_what_was_made_in_the_arena_is_the_result() -> None:
    def work(device: int, communicator: SharedMemory) -> None:
        tensor = whole((30, 7), torch.float32)
        step = planned(FIRST, LINE, (30, 7), torch.float32, device)
        for _ in range(5):
            made = communicator.empty((30, 7), torch.float32).copy_(tensor) if device == 0 else None
            found = exchange(communicator, step, made)
            assert torch.equal(found, tensor)  # type: ignore[arg-type]
            if made is not None:
                assert found is made
                # It is a result now: sent on, it is copied.
                again = exchange(communicator, step, found)
                assert torch.equal(again, tensor)  # type: ignore[arg-type]
                again.zero_()  # type: ignore[union-attr]
                assert torch.equal(found, tensor)  # type: ignore[arg-type]
            else:
                assert torch.equal(exchange(communicator, step, None), tensor)  # type: ignore[arg-type]
        transposed = communicator.empty((7, 30), torch.float32).copy_(tensor.t()).t() if device == 0 else None
        assert torch.equal(exchange(communicator, step, transposed), tensor)  # type: ignore[arg-type]
        made = found = again = transposed = None
        communicator._sent.free_read()
        assert not communicator._arena._sizes
        assert not communicator._sent._made_here

    run_forked([0, 1, 2], work)


def test_results_that_live_on() -> None:
    """Few of them in the arena; none is touched by what is sent afterwards."""

    def work(device: int, communicator: SharedMemory) -> None:
        step = planned(FIRST, LINE, (40, 5), torch.float32, device)
        held = []
        for seed in range(6):
            tensor = whole((40, 5), torch.float32, seed)
            held.append((exchange(communicator, step, tensor if device == 0 else None), tensor))
        assert all(torch.equal(found, tensor) for found, tensor in held)  # type: ignore[arg-type]
        if device == 0:
            communicator._sent.await_readers(len(communicator._sent.waiting))
            assert [is_in_arena(communicator, found) for found, _ in held] == [True] * 2 + [False] * 4  # type: ignore[arg-type]
            assert len(communicator._arena._sizes) == 2
        held.clear()
        assert not communicator._arena._sizes
        tensor = whole((40, 5), torch.float32)
        found = exchange(communicator, step, tensor if device == 0 else None)
        assert torch.equal(found, tensor)  # type: ignore[arg-type]
        assert device or is_in_arena(communicator, found)  # type: ignore[arg-type]

    run_forked([0, 1, 2], work)


@pytest.mark.parametrize("shape", [(100, 80), (400, 200)])
def test_an_arena_with_a_limit(shape: tuple[int, ...]) -> None:
    """Of 128 KB: the result of 32 KB finds room in it while it is the only one, that of 320 KB does not."""

    def work(device: int, communicator: SharedMemory) -> None:
        step = planned(FIRST, LINE, shape, torch.float32, device)
        held = []
        for seed in range(4):
            tensor = whole(shape, torch.float32, seed)
            held.append((exchange(communicator, step, tensor if device == 0 else None), tensor))
            assert communicator._arena._used <= 1 << 17
        assert all(torch.equal(found, tensor) for found, tensor in held)  # type: ignore[arg-type]
        if device == 0:
            assert sum(is_in_arena(communicator, found) for found, _ in held) == (shape == (100, 80))  # type: ignore[arg-type]

    run_forked([0, 1, 2], work, limit=1 << 17)


def test_failures_come_to_the_readers() -> None:
    poison = Poison((0, 77))

    def work(device: int, communicator: SharedMemory) -> None:
        step = planned(FIRST, LINE, (6, 5), torch.float32, device)
        tensor = whole((6, 5), torch.float32)
        assert exchange(communicator, step, poison if device == 0 else None) == poison
        assert torch.equal(exchange(communicator, step, tensor if device == 0 else None), tensor)  # type: ignore[arg-type]
        # Of another shape than was planned.
        with pytest.raises((RuntimeError, ValueError)):
            exchange(communicator, step, torch.ones(2, 5) if device == 0 else None)
        assert torch.equal(exchange(communicator, step, tensor if device == 0 else None), tensor)  # type: ignore[arg-type]
        deep = planned(FIRST, LINE, (1,) * 40, torch.float32, device)
        if device == 0:
            with pytest.raises(ValueError, match="40 dims"):
                exchange(communicator, deep, torch.ones((1,) * 40))
        else:
            assert exchange(communicator, deep, None) == Poison((0, 5))

        def full(*_: object) -> None:
            raise MemoryError("no room")

        communicator._sent.living = full  # type: ignore[method-assign]
        assert torch.equal(exchange(communicator, step, tensor if device == 0 else None), tensor)  # type: ignore[arg-type]

    run_forked([0, 1, 2], work)


def test_halves() -> None:
    """The owner does not wait between them, and what has begun is what ends, though the tensor is written to in between."""

    def work(device: int, communicator: SharedMemory) -> None:
        tensor = whole((30, 7), torch.float32)
        step = planned(FIRST, PAIR, (30, 7), torch.float32, device)
        there = planned(SECOND, FIRST, (4,), torch.float32, device)
        for _ in range(3):
            value = tensor.clone() if device == 0 else None
            communicator.carry(Half(step, True), value, 5)
            communicator.carry(Half(there, True), torch.ones(4) if device == 1 else None, 5)
            assert torch.equal(communicator.carry(Half(step, False), value, 6), tensor)  # type: ignore[arg-type]
            found = communicator.carry(Half(there, False), None, 6)
            assert found is None if device else torch.equal(found, torch.ones(4))  # type: ignore[arg-type]
            assert torch.equal(exchange(communicator, step, value), tensor)  # type: ignore[arg-type]

    run_forked([0, 1], work)
