"""A worker that dies: everything that waits, and the next call, raises WorkerLost soon; a new cluster works in the same script."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import dtorch
from dtorch.errors import DTorchError, WorkerLost

from .scripts import SOON, forever, run, until

SHARD, REPLICATE = [dtorch.Shard(0)], [dtorch.Replicate()]


def pids() -> list[int]:
    return [status.pid for status in dtorch.worker_status().values()]


def kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def lost_soon(killed: float, *calls: Callable) -> None:
    for call in calls:
        with pytest.raises(WorkerLost, match="SIGKILL"):
            call()
        assert time.monotonic() - killed < SOON


@pytest.fixture
def x(mesh: dtorch.DeviceMesh) -> Iterator[dtorch.Tensor]:
    """A tensor of a cluster that the test loses; afterwards a new one must start in its place."""
    x = dtorch.ones((1000, 1000), device_mesh=mesh, placements=SHARD)
    x.sum().item()
    yield x
    assert not dtorch.is_initialized()
    assert {status.state for status in dtorch.worker_status().values()} == {"lost"}
    before = pids()
    dtorch.shutdown()
    dtorch.init(engine="processes")
    assert (dtorch.ones(6, device_mesh=mesh, placements=SHARD) + 1).sum().item() == 12
    assert not set(before) & set(pids())
    for use in (lambda: x + 1, x.to_torch, lambda: repr(x), lambda: x.add_(1), lambda: x.redistribute(mesh, REPLICATE)):
        with pytest.raises(DTorchError, match="belongs to a cluster that has been shut down"):
            use()
    x = dtorch.ones(2, device_mesh=mesh)  # the old one dies
    assert (dtorch.ones(6, device_mesh=mesh, placements=SHARD) + 1).sum().item() == 12
    dtorch.synchronize()


def test_idle(x: dtorch.Tensor) -> None:
    """Also for what the dead worker is not asked for: the first device alone could give a replicated value."""
    replicated = dtorch.ones(2, 2, device_mesh=x.device_mesh)
    replicated.to_torch()
    killed = kill(pids()[1])
    assert until(lambda: not dtorch.is_initialized(), SOON)
    lost_soon(
        killed,
        lambda: x + 1,
        x.to_torch,
        replicated.to_torch,
        lambda: repr(x),
        dtorch.synchronize,
        dtorch.memory_stats,
        lambda: dtorch.ones(2, device_mesh=x.device_mesh),
    )


def test_computing_with_many_waiting(x: dtorch.Tensor) -> None:
    whole = x.redistribute(x.device_mesh, REPLICATE)
    for _ in range(100):
        whole = whole @ whole / 1000
    futures = [whole.to_torch_async(), whole.sum().to_torch_async()]
    errors: list[BaseException | None] = []
    blocked = [threading.Thread(target=lambda f=future: errors.append(f.exception())) for future in futures]
    for thread in blocked:
        thread.start()
    time.sleep(0.1)
    killed = kill(pids()[0])
    lost_soon(killed, futures[0].get, futures[1].get, lambda: whole + 1)
    for thread in blocked:
        thread.join(SOON)
    assert [type(error) for error in errors] == [WorkerLost, WorkerLost]


def test_inside_a_collective(x: dtorch.Tensor) -> None:
    os.kill(pids()[1], signal.SIGSTOP)  # so that the other waits in it
    future = x.redistribute(x.device_mesh, REPLICATE).sum().to_torch_async()
    time.sleep(0.1)
    lost_soon(kill(pids()[1]), future.get)


def test_while_large_tensors_are_on_their_way_back(x: dtorch.Tensor) -> None:
    big = dtorch.ones(1 << 24, device_mesh=x.device_mesh, placements=SHARD)
    pid = pids()[0]
    big.to_torch_async().get()
    os.kill(pid, signal.SIGSTOP)
    futures = [big.to_torch_async() for _ in range(8)]
    killed = kill(pid)
    until(lambda: not dtorch.is_initialized(), SOON)
    lost_soon(killed, futures[-1].get, big.to_torch)


def test_while_the_client_uploads(x: dtorch.Tensor) -> None:
    """It waits for space in the end, because a worker that is stopped takes nothing."""
    pid = pids()[1]
    os.kill(pid, signal.SIGSTOP)
    big = torch.ones(1 << 26)
    killed: list[float] = []
    timer = threading.Timer(1.5, lambda: killed.append(kill(pid)))
    timer.start()
    with pytest.raises(WorkerLost, match="SIGKILL"):
        forever(lambda: dtorch.distribute_tensor(big, x.device_mesh, SHARD))
    assert time.monotonic() - killed[0] < SOON


def test_while_the_client_is_too_far_ahead(x: dtorch.Tensor) -> None:
    pid = pids()[0]
    os.kill(pid, signal.SIGSTOP)
    killed: list[float] = []
    timer = threading.Timer(1.5, lambda: killed.append(kill(pid)))
    timer.start()
    with pytest.raises(WorkerLost, match="SIGKILL"):
        forever(lambda: x.add_(1))
    assert time.monotonic() - killed[0] < SOON


@pytest.mark.parametrize(
    ("see", "status"), [("", 1), ("try: x + 1\n        except dtorch.errors.WorkerLost: pass", 0), ("x + 1", 1)]
)
def test_a_script_that_ends_with_a_lost_cluster(see: str, status: int) -> None:
    """It ends soon; a loss that nobody was told of is told, and makes the status 1."""
    found, _, err = run(f"""
        x = dtorch.ones(6, device_mesh=mesh, placements=shard)
        x.to_torch()
        os.kill(workers()[0], signal.SIGKILL)
        while dtorch.is_initialized(): time.sleep(0.01)
        {see}
    """)
    assert found == status, err
    assert ("SIGKILL" in err) == bool(status)
    assert err.count("SIGKILL") == status


def test_the_last_words_of_a_noisy_worker(mesh: dtorch.DeviceMesh, tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "noisy_library.py").write_text("""
import sys, torch
for number in range(100_000): print(f"noise {number}", file=sys.stderr)
""")
    monkeypatch.syspath_prepend(str(tmp_path))
    dtorch.shutdown()
    dtorch.init(engine="processes", worker_imports=["noisy_library"])
    x = dtorch.ones(4, device_mesh=mesh, placements=SHARD)
    assert x.sum().item() == 4
    kill(pids()[0])
    with pytest.raises(WorkerLost) as caught:
        forever(lambda: (x + 1).to_torch())
    lines = str(caught.value).splitlines()
    assert lines[-1].strip() == "noise 99999"
    assert len(lines) < 30
