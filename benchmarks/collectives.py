"""Collectives between worker processes of one machine, through the memory they share, beside gloo's, in the same processes.

The size is that of the whole tensor. Gloo reduces and sends in place or into tensors that are there already; ours makes a new one each
time. "In place": what is added up was computed in shared memory (`SharedMemory.empty`). There and back: from process 0 to 1, and to 0
again. Each process times its own rounds; process 0 tells. "memcpy": process 0 copies as many bytes between two tensors of its own that are
there already, while the others wait; a broadcast is one such copy into shared memory and then one out of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from dtorch.mesh import DeviceMesh
from dtorch.placement import PARTIAL, REPLICATE, PlacementList, shard
from dtorch.sharding.transfer import steps
from dtorch.worker.comm.arena import create_segment
from dtorch.worker.comm.control import Control
from dtorch.worker.comm.shared import SharedMemory

from .measure import Row, ratio, rounds, row

#: (processes, bytes, calls a round, the least that gloo's time should be over ours)
CASES = (
    (2, 4 << 10, 50, 12),
    (2, 1 << 20, 10, 5),
    (2, 64 << 20, 1, 2),
    (4, 4 << 10, 20, 8),
    (4, 1 << 20, 3, 8),
)
IN_PLACE = "all-reduce in place"
LEAST_IN_PLACE = 4
MEMCPY = "memcpy"
#: What one process gives and others get as it is.
ONE_WAY = ("broadcast", "there and back")


def run() -> list[Row]:
    return [line for case in CASES for line in _compete(*case)]


def _compete(processes: int, nbytes: int, calls: int, least: int) -> list[Row]:
    memory = create_segment(processes)
    read, write = os.pipe()
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for device in range(processes):
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    seconds = _member(device, processes, memory, f"{directory}/store", nbytes, calls)
                    if device == 0:
                        os.write(write, json.dumps(seconds).encode())
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        os.close(write)
        with os.fdopen(read) as text:
            told = text.read()
        failed = [pid for pid in children if os.waitpid(pid, 0)[1]]
    os.close(memory)
    if failed:
        raise RuntimeError(f"{len(failed)} of {processes} processes failed")
    found = json.loads(told)
    name = f"{nbytes >> 10} KB" if nbytes < 1 << 20 else f"{nbytes >> 20} MB"
    about = f"{processes} processes, {name}"
    lines = []
    memcpy = found.pop(MEMCPY)
    lines.append(row(f"{about}, {MEMCPY}", memcpy))
    for kind in (kind for kind in found if not kind.startswith("gloo")):
        gloo = found[f"gloo, {kind.removesuffix(' in place')}"]
        bound = LEAST_IN_PLACE if kind == IN_PLACE else least
        lines += [
            row(f"{about}, {kind}", found[kind]),
            ratio(f"{about}, {kind}: gloo over ours", gloo, found[kind], f"at least {bound}"),
        ]
        if kind in ONE_WAY:
            lines.append(ratio(f"{about}, {kind}: ours over memcpy", found[kind], memcpy))
    return lines


def _member(device: int, processes: int, memory: int, store: str, nbytes: int, calls: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    group = c10d.ProcessGroupGloo(c10d.FileStore(store, processes), device, processes)
    communicator = SharedMemory(memory, Control(memory, processes), device)
    shape = (64, nbytes // 256)
    ours = _ours(communicator, device, processes, shape, in_place=nbytes >= 64 << 20)
    source, target = torch.ones(shape), torch.zeros(shape)
    copying = {MEMCPY: (lambda: target.copy_(source)) if device == 0 else lambda: None}
    contestants = {
        **copying,
        **ours,
        **{f"gloo, {name}": call for name, call in _gloo(group, device, processes, shape).items()},
    }
    return rounds(contestants, calls=calls, repeat=9, between=lambda: group.barrier().wait())


def _ours(
    communicator: SharedMemory, device: int, processes: int, shape: tuple[int, int], in_place: bool
) -> dict[str, Callable[[], Any]]:
    everyone, first, second = DeviceMesh("cpu", list(range(processes))), DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).remainder_(1000).view(shape)
    rows, columns = whole.chunk(processes, 0)[device], whole.chunk(processes, 1)[device].contiguous()
    addend = whole * (device + 1)
    total = processes * (processes + 1) // 2

    def moved(
        value: Any, source_mesh: DeviceMesh, source: Any, target_mesh: DeviceMesh, target: Any
    ) -> Callable[[], Any]:
        plan = steps(
            source_mesh, PlacementList([source]), target_mesh, PlacementList([target]), shape, torch.float32, device
        )

        def call() -> Any:
            found = value() if callable(value) else value
            for step in plan:
                found = communicator.transfer(step, found, 0)
            return found

        return call

    there = moved(whole if device == 0 else None, first, REPLICATE, second, REPLICATE)
    back = moved(whole if device == 1 else None, second, REPLICATE, first, REPLICATE)
    calls = {
        "all-reduce": (moved(addend, everyone, PARTIAL, everyone, REPLICATE), whole * total),
        IN_PLACE: (
            moved(lambda: communicator.empty(shape, torch.float32), everyone, PARTIAL, everyone, REPLICATE),
            None,
        ),
        "reduce-scatter": (moved(addend, everyone, PARTIAL, everyone, shard(0)), rows * total),
        "all-gather": (moved(rows, everyone, shard(0), everyone, REPLICATE), whole),
        "all-to-all": (moved(rows, everyone, shard(0), everyone, shard(1)), columns),
        "broadcast": (moved(whole if device == 0 else None, first, REPLICATE, everyone, REPLICATE), whole),
        "there and back": (lambda: (there(), back()), None),
    }
    if not in_place:
        del calls[IN_PLACE]
    for name, (call, expected) in calls.items():
        found = call()
        assert expected is None or torch.equal(found, expected), name
    return {name: call for name, (call, _) in calls.items()}


def _gloo(group: Any, device: int, processes: int, shape: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    whole, part = torch.zeros(shape), torch.zeros(shape[0] // processes, shape[1])
    other = torch.zeros_like(part)
    parts = list(torch.zeros(shape).chunk(processes))

    def there_and_back() -> None:
        for sender in (0, 1):
            if device == sender:
                group.send([whole], 1 - sender, 0).wait()
            elif device == 1 - sender:
                group.recv([whole], sender, 0).wait()

    return {
        "all-reduce": lambda: group.allreduce([whole]).wait(),
        "reduce-scatter": lambda: group._reduce_scatter_base(part, whole).wait(),
        "all-gather": lambda: group.allgather([parts], [part]).wait(),
        "all-to-all": lambda: group.alltoall_base(other, part, [], []).wait(),
        "broadcast": lambda: group.broadcast([whole]).wait(),
        "there and back": there_and_back,
    }
