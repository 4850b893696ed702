"""Ctrl-C: KeyboardInterrupt at once wherever Python waits, and the cluster goes on as if nothing had happened."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch import memory_pool
from dtorch.client import host

from .scripts import forever, running, succeeds

SHARD, REPLICATE = [dtorch.Shard(0)], [dtorch.Replicate()]


def interrupted(call: Callable, seconds: float = 0.3) -> None:
    """``call()`` would take long; Ctrl-C ends it."""
    sent: list[float] = []

    def press() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(seconds, press)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call()
    assert time.monotonic() - sent[0] < 2
    timer.join()


def test_waits(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(8, device_mesh=mesh, placements=SHARD)
    x.sum().item()
    first, _ = (status.pid for status in dtorch.worker_status().values())
    big = torch.ones(1 << 25)
    counted = 0

    def count() -> None:
        nonlocal counted
        x.add_(1)
        counted += 1

    for wait in (
        x.to_torch,
        lambda: repr(x),
        lambda: x.sum().item(),
        dtorch.synchronize,
        dtorch.memory_stats,
        lambda: next(iter(dtorch.as_completed([x.to_torch_async()]))),
        lambda: forever(lambda: dtorch.distribute_tensor(big, mesh, SHARD)),  # waits for space
    ):
        os.kill(first, signal.SIGSTOP)
        interrupted(wait, 1.0)
        os.kill(first, signal.SIGCONT)
        assert x.sum().item() == 8
    os.kill(first, signal.SIGSTOP)
    interrupted(lambda: forever(count), 1.5)  # waits because it is too far ahead
    os.kill(first, signal.SIGCONT)
    assert x.to_torch().unique().item() in (1 + counted, 2 + counted)


def test_while_ops_are_issued(mesh: dtorch.DeviceMesh) -> None:
    """No command is lost or repeated, wherever the interrupt falls."""
    x = dtorch.zeros(8, device_mesh=mesh, placements=SHARD)
    view = x.view(2, 4)
    y = dtorch.zeros(8, device_mesh=mesh, placements=SHARD)
    for attempt in range(20):

        def work() -> None:
            while True:
                view.add_(1)
                y.copy_(x)

        interrupted(work, 0.02 + 0.003 * attempt)
        assert not (x - y).to_torch().abs().max() > 1
    assert dtorch.is_initialized()
    dtorch.synchronize()


def press() -> None:
    signal.raise_signal(signal.SIGINT)


class Pressing:
    handles = property(lambda self: 1, lambda self, count: count or press())


@pytest.mark.parametrize(
    "make",
    [
        lambda: memory_pool.leased(mmap.mmap(-1, 4096), 0, 4096, press),
        lambda: host.HostHandle(torch.ones(1), Pressing()),
    ],
    ids=["memory", "handle"],
)
def test_while_something_dies(mesh: dtorch.DeviceMesh, make: Callable[[], object]) -> None:
    """Python drops what a finalizer raises: KeyboardInterrupt comes a moment later."""
    dtorch.ones(1, device_mesh=mesh)  # so that Ctrl-C is ours
    made = [make()]
    with pytest.raises(KeyboardInterrupt):
        _ = made.clear(), time.sleep(5)


def test_while_the_engine_starts() -> None:
    out = succeeds(
        """
        for delay in (0.01, 0.05, 0.3, 1.0):
            timer = threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT])
            try:
                timer.start()
                dtorch.ones(3, device_mesh=mesh).to_torch()
                timer.join()
                time.sleep(1)
            except KeyboardInterrupt:
                say("interrupted")
        say(dtorch.ones(4, device_mesh=mesh, placements=shard).sum().item())
        """
    )
    assert out == "interrupted\n" * 4 + "4.0\n"


def test_a_script_that_is_interrupted_does_not_wait_for_its_work() -> None:
    code = """
        x = dtorch.ones(4, device_mesh=mesh)
        x.to_torch()
        os.kill(workers()[0], signal.SIGSTOP)
        y = x + 1
        say("waiting")
        y.to_torch()
    """
    with running(code) as script:
        assert script.line() == "waiting"
        time.sleep(0.2)
        start = time.monotonic()
        script.process.send_signal(signal.SIGINT)
        status, _, err = script.finish()
        assert time.monotonic() - start < 10
        assert status in (-signal.SIGINT, 128 + signal.SIGINT)
        assert "KeyboardInterrupt" in err
        assert not script.left()
