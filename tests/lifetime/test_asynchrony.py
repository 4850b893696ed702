"""Ops return at once, queued work starts at once, values come back in every way a program may wait for them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch.errors import DTorchError, RemoteError

from .scripts import until

SHARD, REPLICATE = [dtorch.Shard(0)], [dtorch.Replicate()]

LIBRARY = """
import pathlib, torch
@torch.library.custom_op("lifetime::mark", mutates_args=())
def mark(x: torch.Tensor, path: str) -> torch.Tensor:
    pathlib.Path(path).touch()
    return x.clone()
@mark.register_fake
def _(x, path): return torch.empty_like(x)
"""


def stopped() -> int:
    """Stop the first worker; its process id."""
    pid = next(iter(dtorch.worker_status().values())).pid
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_ops_do_not_wait_for_workers(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones((4, 4), device_mesh=mesh, placements=SHARD)
    (x @ x).sum().item()
    pid = stopped()
    x.requires_grad_(True)
    for _ in range(10):
        loss = ((x @ x).redistribute(mesh, REPLICATE) * 2).sum()
        loss.backward()
        with torch.no_grad():
            x -= 0.0 * x.grad
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|size|shape"):
        x @ dtorch.ones((3, 3), device_mesh=mesh)  # a wrong shape is known here and now
    future = loss.to_torch_async()
    assert not future.wait(0.05)
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.get(timeout=0.01)
    assert max(status.behind for status in dtorch.worker_status().values()) > 50
    os.kill(pid, signal.SIGCONT)
    assert future.get().item() == 128


def test_queued_work_starts_though_python_does_something_else(
    mesh: dtorch.DeviceMesh, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "lifetime_marking.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    dtorch.shutdown()
    dtorch.init(engine="processes", worker_imports=["lifetime_marking"])
    import lifetime_marking

    x = dtorch.ones(4, device_mesh=mesh, placements=SHARD)
    x.to_torch()
    for count in (1, 3):
        path = tmp_path / f"ran {count}"
        for _ in range(count):
            y = x + 1
        y = lifetime_marking.mark(y, str(path))
        assert until(
            path.exists
        )  # nothing of dtorch is called meanwhile; the worker's first custom op imports torch._dynamo
    assert y.sum().item() == 8


def test_awaiting_and_completion_in_any_order(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(4, device_mesh=mesh, placements=SHARD)
    bad = torch.index_select(x, 0, dtorch.full((1,), 9, device_mesh=mesh))

    async def gather() -> list:
        loop_thread = threading.current_thread()
        results = await asyncio.gather(*[wait(x + n) for n in range(5)])
        assert threading.current_thread() is loop_thread
        with pytest.raises(RemoteError, match=r"test_asynchrony\.py"):
            await bad.to_torch_async()
        pid = stopped()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(x), 0.1)
        os.kill(pid, signal.SIGCONT)
        return results

    async def wait(tensor: dtorch.Tensor) -> float:
        return (await tensor.to_torch_async()).sum().item()

    assert asyncio.run(gather()) == [4.0, 8.0, 12.0, 16.0, 20.0]
    futures = [(x * n).sum().to_torch_async() for n in range(20)] + [bad.to_torch_async()]
    done = list(dtorch.as_completed(futures))
    assert sorted(map(id, done)) == sorted(map(id, futures))
    assert sum(future.exception() is not None for future in done) == 1


def test_callbacks(mesh: dtorch.DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    x = dtorch.ones(4, device_mesh=mesh, placements=SHARD)
    seen: list = []

    def use(future: dtorch.TensorFuture) -> None:
        seen.append((future.get().sum().item(), (x + 1).to_torch().sum().item(), threading.current_thread().name))

    def fail(future: dtorch.TensorFuture) -> None:
        raise ValueError("of a callback")

    pid = stopped()
    future = x.to_torch_async()
    for callback in (fail, lambda f: sys.exit(3), use):
        future.add_done_callback(callback)
    os.kill(pid, signal.SIGCONT)
    assert until(lambda: len(seen) == 1)
    future.add_done_callback(use)  # done already
    assert until(lambda: len(seen) == 2)
    assert {entry[:2] for entry in seen} == {(4.0, 8.0)}
    assert len({entry[2] for entry in seen} - {threading.current_thread().name}) == 1
    errors = [r for r in caplog.records if r.name == "dtorch" and r.levelno == logging.ERROR]
    assert [type(r.exc_info[1]) for r in errors] == [ValueError, SystemExit]


def test_a_get_is_a_snapshot_at_its_place(mesh: dtorch.DeviceMesh) -> None:
    for size in (4, 1 << 20):
        x = dtorch.zeros(size, device_mesh=mesh, placements=SHARD)
        futures = []
        for _ in range(5):
            futures.append(x.to_torch_async())
            x.add_(1)
        assert [future.get()[-1].item() for future in futures] == [0, 1, 2, 3, 4]
        futures[0].get().add_(7)  # the client's own copy
        assert x.to_torch().max().item() == 5


def test_shutdown_is_told_to_those_who_wait(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(4, device_mesh=mesh, placements=SHARD)
    stopped()
    future = x.to_torch_async()
    errors: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: errors.append(future.exception()))
    thread.start()
    time.sleep(0.05)
    assert dtorch.is_initialized()
    assert dtorch.devices() == [torch.device("cpu", 0), torch.device("cpu", 1)]
    with pytest.raises(DTorchError, match="running already"):
        dtorch.init()
    dtorch.shutdown()
    dtorch.shutdown()
    thread.join(5)
    assert len(errors) == 1
    assert "shut down" in str(errors[0])
    assert not dtorch.is_initialized()
    assert dtorch.devices() == []
    assert dtorch.worker_status() == {}
    assert dtorch.memory_stats() == {}
    dtorch.synchronize()
    for use in (lambda: x + 1, x.to_torch, lambda: repr(x), lambda: dtorch.ones(2, device_mesh=mesh)):
        with pytest.raises(DTorchError, match=r"dtorch.init\(\)"):
            use()


def test_threads_issue_ops_and_gradients_at_once(mesh: dtorch.DeviceMesh) -> None:
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        x = dtorch.full((6,), float(number), device_mesh=mesh, placements=SHARD).requires_grad_(True)
        for _ in range(50):
            (x * x).sum().backward()
        results[number] = x.grad.to_torch()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        assert torch.equal(results[number], torch.full((6,), 100.0 * number))
