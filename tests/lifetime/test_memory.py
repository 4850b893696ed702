"""What is dead is freed on the workers as soon as its last use has run; what runs ahead is bounded; loops leave nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch.client import runtime

from .scripts import until

SHARD, REPLICATE = [dtorch.Shard(0)], [dtorch.Replicate()]
MIB = 1 << 20


def live() -> list[int]:
    return [stats["live"] for stats in dtorch.memory_stats().values()]


def resident(pid: int, what: str = "VmRSS") -> int:
    """Bytes of memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise LookupError(what)


def test_stats_are_true_and_per_device(mesh: dtorch.DeviceMesh) -> None:
    base = live()
    three = dtorch.DeviceMesh("cpu", [0, 1, 2])
    x = dtorch.ones(10, dtype=torch.float64, device_mesh=three, placements=SHARD)  # 4, 4 and 2 elements
    y = x[:]  # the same memory
    w = dtorch.ones(5, device_mesh=mesh, placements=REPLICATE)
    assert live() == [base[0] + 52, base[1] + 52, 16]
    stats = dtorch.memory_stats(mesh)
    assert list(stats) == [torch.device("cpu", 0), torch.device("cpu", 1)]
    assert all(entry["peak"] >= entry["live"] for entry in stats.values())
    del x
    assert live() == [base[0] + 52, base[1] + 52, 16]
    del y, w
    assert live() == [base[0], base[1], 0]
    big = dtorch.ones(MIB, device_mesh=mesh, placements=REPLICATE) + 1
    assert live()[0] == base[0] + 4 * MIB
    del big
    dtorch.memory_stats(reset_peak=True)
    assert dtorch.memory_stats()[torch.device("cpu", 0)]["peak"] == base[0]


def test_a_dead_tensor_is_freed_after_its_last_use(mesh: dtorch.DeviceMesh) -> None:
    base = live()
    x = dtorch.ones(MIB, device_mesh=mesh, placements=SHARD)
    y = x + 1
    del x
    assert live() == [b + 2 * MIB for b in base]
    assert y.sum().item() == 2 * MIB
    cycle: list = [y]
    cycle.append(cycle)
    gc.disable()
    try:
        del y, cycle
        assert live() == [b + 2 * MIB for b in base]
    finally:
        gc.enable()
    gc.collect()
    assert live() == base
    leaf = dtorch.ones(MIB, device_mesh=mesh, placements=SHARD).requires_grad_(True)
    loss = (leaf * leaf).exp().sum()
    loss.backward()
    assert live() >= [b + 4 * MIB for b in base]
    leaf.grad = None
    del loss
    assert live() == [b + 2 * MIB for b in base]


def test_what_dies_while_python_is_idle_is_freed_too(mesh: dtorch.DeviceMesh) -> None:
    pid = next(iter(dtorch.worker_status().values())).pid
    x = dtorch.ones(64 * MIB, device_mesh=mesh, placements=SHARD)
    x.sum().item()
    before = resident(pid)
    del x  # nothing of dtorch is called after this
    assert until(lambda: resident(pid) < before - 100 * MIB, 10)


def test_a_long_loop_leaves_nothing_behind(mesh: dtorch.DeviceMesh) -> None:
    controller = runtime.controller()
    x = dtorch.ones(8, device_mesh=mesh, placements=SHARD)
    weight = dtorch.ones(8, device_mesh=mesh, placements=SHARD).requires_grad_(True)

    def loop(count: int) -> None:
        for number in range(count):
            y = x + number
            y.mul_(2)
            if not number % 50:
                weight.grad = None
                (weight * y).sum().backward()
            if not number % 500:
                y[:3].to_torch()
        dtorch.synchronize()

    def measure() -> tuple:
        gc.collect()
        tables = [
            len(t)
            for t in (
                controller.programs,
                controller.meshes,
                controller.waiting,
                controller.failures,
                controller.outbox,
            )
        ]
        values = [stats["values"] for stats in dtorch.memory_stats().values()]
        return tables, values, live()

    loop(5000)
    before, client = measure(), resident(os.getpid())
    workers = [resident(status.pid) for status in dtorch.worker_status().values()]
    loop(45_000)
    assert measure() == before
    assert resident(os.getpid()) < client + 32 * MIB
    after = [resident(status.pid) for status in dtorch.worker_status().values()]
    assert all(a < b + 32 * MIB for a, b in zip(after, workers, strict=True))


def test_growing_shapes_make_no_growing_tables_of_programs(mesh: dtorch.DeviceMesh) -> None:
    """As a decoding loop does: every step has a shape of its own."""
    controller = runtime.controller()
    x = dtorch.ones((4, 300), device_mesh=mesh, placements=SHARD)

    def steps(first: int, last: int) -> None:
        for length in range(first, last):
            (x[:, :length] * 2).sum(1)
        dtorch.synchronize()

    steps(1, 20)
    programs = len(controller.programs)
    steps(20, 200)
    assert len(controller.programs) <= programs + 5


LOOPS = {
    "results": lambda mesh, plain: dtorch.ones(16 * MIB, device_mesh=mesh, placements=SHARD),
    "uploads": lambda mesh, plain: dtorch.distribute_tensor(plain, mesh, SHARD),
    "small uploads": lambda mesh, plain: dtorch.distribute_tensor(plain[:15_000], mesh, SHARD),
}


@pytest.mark.parametrize("what", LOOPS)
def test_the_client_runs_ahead_by_bounded_bytes(mesh: dtorch.DeviceMesh, what: str) -> None:
    """A worker is stopped, and a loop goes on: it must come to a halt before it has queued more than some GiB.

    Of results more, which cost nothing before a worker makes them, and earlier ones are freed by then.
    """
    plain = torch.ones(16 * MIB)
    make = LOOPS[what]
    make(mesh, plain).sum().item()
    pid = next(iter(dtorch.worker_status().values())).pid
    step = make(mesh, plain).nbytes
    before = resident(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    made = 0
    finished = False

    def loop() -> None:
        nonlocal made, finished
        while made < 32 << 30:
            make(mesh, plain)
            made += step
        finished = True

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    counts: list[int] = []

    def halted() -> bool:
        counts.append(made)
        return finished or (len(counts) > 10 and len(set(counts[-10:])) == 1)

    try:
        assert until(halted, step=0.1)
        assert not finished
        assert made < (16 << 30 if what == "results" else 4 << 30)
        assert resident(os.getpid()) < before + (5 << 29)
    finally:
        os.kill(pid, signal.SIGCONT)
        made = 32 << 30
        thread.join()
    assert dtorch.ones(4, device_mesh=mesh).sum().item() == 4


def test_values_asked_for_are_bounded_too(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(16 * MIB, device_mesh=mesh, placements=SHARD)
    x.to_torch()
    before = resident(os.getpid())
    for _ in range(100):  # 6.4 GB
        x.to_torch_async()
    assert resident(os.getpid()) < before + (3 << 30)
