"""An all-reduce between worker processes of one machine, through the memory they share, beside gloo's, in the same processes.

Ours copies the value into the arena first; what a value that is computed there costs is not built. Each process times its own rounds;
process 0 tells.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from dtorch.mesh import DeviceMesh
from dtorch.placement import PARTIAL, REPLICATE, PlacementList
from dtorch.sharding.transfer import steps
from dtorch.worker.comm.arena import create_segment
from dtorch.worker.comm.control import Control
from dtorch.worker.comm.shared import SharedMemory

from .measure import Row, ratio, rounds, row

#: (processes, bytes, calls a round, the least that gloo's time should be over ours)
CASES = (
    (2, 4 << 10, 100, 12),
    (2, 1 << 20, 20, 5),
    (2, 64 << 20, 1, 2),
    (4, 4 << 10, 10, 8),
    (4, 1 << 20, 5, 8),
)


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
    return [
        *[row(f"{about}, {who}", times) for who, times in found.items()],
        ratio(f"{about}, gloo over shared memory", found["gloo"], found["shared memory"], f"at least {least}"),
    ]


def _member(device: int, processes: int, memory: int, store: str, nbytes: int, calls: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    group = c10d.ProcessGroupGloo(c10d.FileStore(store, processes), device, processes)
    communicator = SharedMemory(memory, Control(memory, processes), device)
    mesh = DeviceMesh("cpu", list(range(processes)))
    value = torch.full((nbytes // 4,), float(device))
    pending, whole = PlacementList([PARTIAL]), PlacementList([REPLICATE])
    transfers = steps(mesh, pending, mesh, whole, tuple(value.shape), value.dtype, device)
    other = value.clone()

    def ours() -> Any:
        found = value
        for transfer in transfers:
            found = communicator.transfer(transfer, found, 0)
        return found

    def gloo() -> None:
        group.allreduce([other]).wait()

    assert torch.equal(ours(), torch.full_like(value, processes * (processes - 1) / 2))
    contestants = {"shared memory": ours, "gloo": gloo}
    return rounds(contestants, calls=calls, repeat=9, between=lambda: group.barrier().wait())
