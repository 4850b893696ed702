"""A large value is copied out while it is copied in, where each device wants a part of its own; and nobody waits for ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch.client import runtime
from dtorch.engine import staging
from dtorch.worker.comm import ring
from dtorch.worker.comm.control import NEVER, REST

SHARD = [dtorch.Shard(0)]


@pytest.fixture(autouse=True)
def mesh(monkeypatch) -> Iterator[dtorch.DeviceMesh]:
    monkeypatch.setattr(ring, "SMALLEST_BYTES", 1 << 20)
    monkeypatch.setattr(staging, "_IDLE_SECONDS", 5.0)  # a busy machine's workers are late to say that they are done
    dtorch.shutdown()
    dtorch.init(engine="processes")
    yield dtorch.DeviceMesh("cpu", [0, 1])
    dtorch.shutdown()


def shown() -> int:
    """Slabs that went through the ring, or were meant to, so far."""
    source = runtime.controller().engine._staging._source
    return 0 if source is None else source.shown


def has_spilt() -> bool:
    return runtime.controller().engine._control.words[REST] != NEVER


def stop(device: int) -> int:
    """Stop a worker that has said that it has run everything, which it does a moment after its last reply."""
    engine = runtime.controller().engine
    dtorch.synchronize()
    assert engine._staging._are_idle()
    os.kill(engine.pids[device], signal.SIGSTOP)
    return engine.pids[device]


def put(plain: torch.Tensor, mesh: dtorch.DeviceMesh, placements: Any = SHARD) -> dtorch.Tensor:
    """``plain`` on the mesh, by the ring: nothing else is under way."""
    dtorch.ones(1, device_mesh=mesh).sum().item()
    dtorch.synchronize()
    before = shown()
    x = dtorch.distribute_tensor(plain, mesh, placements)
    assert shown() > before
    return x


SHAPES = [(3_000_001,), (1001, 3003), (3, 5, 700, 301), (2, 1, 2_000_000), (5_000_000, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(mesh, shape: tuple[int, ...], monkeypatch) -> None:
    plain = torch.rand(shape)
    placements = [[dtorch.Shard(dim)] for dim in range(len(shape))]
    for _ in range(3):
        for one in placements:
            assert torch.equal(put(plain, mesh, one).to_torch(), plain)
    monkeypatch.setattr(ring, "_PATIENCE", 1e30)  # none: what the workers are late for goes the other way
    for one in placements:
        assert torch.equal(put(plain + 1, mesh, one).to_torch(), plain + 1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex128, torch.int16], ids=str)
def test_dtypes(mesh, dtype: torch.dtype) -> None:
    plain = torch.randint(0, 2, (1500, 1111)).to(dtype)
    for _ in range(2):
        assert torch.equal(put(plain, mesh, [dtorch.Shard(1)]).to_torch(), plain)


def test_views_and_conjugates(mesh) -> None:
    base = torch.randn(900, 800, dtype=torch.complex64)
    for plain in (base.T, base[::2, 3:], base.conj(), base.conj().imag):
        assert torch.equal(put(plain, mesh).to_torch(), plain)


def test_several_axes_and_parts_of_the_workers() -> None:
    square = dtorch.DeviceMesh("cpu", [[0, 1], [2, 3]])
    plain = torch.rand(1003, 1001)
    both = [dtorch.Shard(1), dtorch.Shard(0)]
    assert torch.equal(put(plain, square, both).to_torch(), plain)
    for ids in ([1, 3], [2], [3, 0, 1]):
        some = dtorch.DeviceMesh("cpu", ids)
        assert torch.equal(put(plain, some).to_torch(), plain)


def test_what_several_devices_want_goes_the_other_way(mesh) -> None:
    plain = torch.rand(1 << 20)
    x = dtorch.distribute_tensor(plain, mesh, [dtorch.Replicate()])
    assert shown() == 0
    assert torch.equal(x.to_torch(), plain)


def test_the_plain_tensor_may_be_written_to_at_once(mesh) -> None:
    plain = torch.rand(5 << 20)
    kept = plain.clone()
    x = put(plain, mesh)
    plain.zero_()
    assert torch.equal(x.to_torch(), kept)


def test_the_client_does_not_wait_for_a_stopped_worker(mesh, monkeypatch) -> None:
    plain = torch.rand(8 << 20)
    put(plain, mesh).to_torch()
    pid = stop(0)
    try:
        before = shown()
        x = dtorch.distribute_tensor(plain + 1, mesh, SHARD)
        assert shown() > before
        assert has_spilt()
        monkeypatch.setattr(staging, "_IDLE_SECONDS", 0.01)
        y = dtorch.distribute_tensor(plain + 2, mesh, SHARD)  # while that one is under way
    finally:
        os.kill(pid, signal.SIGCONT)
    assert torch.equal(x.to_torch(), plain + 1)
    assert torch.equal(y.to_torch(), plain + 2)
    assert torch.equal(put(plain, mesh).to_torch(), plain)


def test_a_worker_that_dies_meanwhile(mesh) -> None:
    plain = torch.rand(8 << 20)
    put(plain, mesh)
    pid = stop(1)
    x = dtorch.distribute_tensor(plain, mesh, SHARD)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(dtorch.errors.WorkerLost):
        x.to_torch()


def test_ctrl_c_in_the_midst_comes_after_the_end(mesh, monkeypatch) -> None:
    plain = torch.rand(8 << 20)
    copies = []
    move = ring.ctypes.memmove

    def interrupted(*arguments: int) -> None:
        copies.append(1)
        if len(copies) == 3:
            signal.raise_signal(signal.SIGINT)
        move(*arguments)

    kept = [put(plain, mesh)]
    dtorch.synchronize()
    monkeypatch.setattr(ring.ctypes, "memmove", interrupted)

    def put_and_wait() -> None:
        kept.append(dtorch.distribute_tensor(plain, mesh, SHARD))
        threading.Event().wait(10)

    with pytest.raises(KeyboardInterrupt):
        put_and_wait()
    monkeypatch.undo()
    assert len(copies) == 16
    assert torch.equal(kept[0].to_torch(), plain)
    assert torch.equal(dtorch.distribute_tensor(plain + 1, mesh, SHARD).to_torch(), plain + 1)


def test_an_error_in_the_midst_ends_the_cluster_and_hangs_nobody(mesh, monkeypatch) -> None:
    plain = torch.rand(8 << 20)
    x = put(plain, mesh)
    dtorch.synchronize()

    def fails(*arguments: int) -> None:
        raise MemoryError("of the test")

    with monkeypatch.context() as patch:
        patch.setattr(ring.ctypes, "memmove", fails)
        with pytest.raises(MemoryError, match="of the test"):
            dtorch.distribute_tensor(plain, mesh, SHARD)
    with pytest.raises(dtorch.errors.WorkerLost, match="while a value was being sent"):
        x.to_torch()


def test_threads(mesh) -> None:
    plain = torch.rand(2 << 20)
    wrong = []

    def loop(own: int) -> None:
        for number in range(10):
            x = dtorch.distribute_tensor(plain + own + number, mesh, SHARD)
            if not torch.equal((x * 2).to_torch(), (plain + own + number) * 2):
                wrong.append((own, number))

    threads = [threading.Thread(target=loop, args=(own,)) for own in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_loop_takes_no_more_memory(mesh) -> None:
    plain = torch.rand(4 << 20)
    for number in range(10):
        assert torch.equal(put(plain + number, mesh).to_torch(), plain + number)
    assert runtime.controller().engine._staging._arena._end <= ring.RING_BYTES + 4 * plain.nbytes
