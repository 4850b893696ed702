"""A worker's main loop: receive a batch, run its commands, say how far it is, send what happened."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import memory_pool
from ..engine.channel import WorkerChannel
from ..engine.protocol import IMPORT, READY
from ..errors import WorkerLost
from ..raw import copy
from ..sharding.layout import Box
from .assemble import cut
from .comm.arena import CLIENT, Region
from .comm.control import Control
from .comm.process_groups import ProcessGroups
from .comm.ring import Sink
from .comm.sockets import Sockets
from .executor import Executor, Steps


class SharedBlobs:
    """The client's bytes: in the command itself, or in the client's region of the shared memory."""

    def __init__(self, fd: int, control: Control, device: int) -> None:
        self._region = Region(fd, CLIENT)
        self._ring = Sink(control, self._region, device)

    def fill(self, target: torch.Tensor, blob: Any, dtype: torch.dtype, shape: Sequence[int], box: Box) -> None:
        """See `dtorch.worker.values_in_out.Blobs`."""
        if not isinstance(blob, list):  # frombuffer warns of a buffer that it may not write to
            memory = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        elif len(blob) == 2:
            memory = self._region.bytes(*blob)
        else:
            self._ring.take(blob, dtype, shape, box, target)
            return
        copy(target, cut(memory.view(dtype).view(tuple(shape)), box))

    def landing(self, landing: Any) -> torch.Tensor:
        """See `dtorch.worker.values_in_out.Blobs`."""
        return self._region.bytes(*landing)


def main(
    device: int,
    fd: int,
    address: str,
    *,
    devices: int,
    batch: int,
    sequence: int,
    threads: int,
    path: list[str],
    imports: list[str],
    arena_bytes: int | None,
    is_shared: bool,
) -> None:
    """Work for one device until the process is ended; it is, by its parent, when the client closes or dies.

    Args:
        fd: the shared segment, for up to ``devices`` devices.
        address: of the channel.
        batch: the number of the first batch to come.
        sequence: the number of its first command.
        path: the client's ``sys.path``.
        imports: modules to import first.
        arena_bytes: the limit of this device's arena.
        is_shared: others read from it; else what they need is sent to them.
    """
    sys.path[:] = path
    torch.set_num_threads(threads)
    channel = WorkerChannel(address, batch)
    events: list[list] = []
    control = Control(fd, devices)
    communicator = (ProcessGroups if is_shared else Sockets)(fd, control, device, address, limit=arena_bytes)
    executor = Executor(device, events.append, SharedBlobs(fd, control, device), empty=communicator.empty)
    for name in imports:
        importlib.import_module(name)  # a module that cannot be imported ends the worker, with its traceback
        executor.run([IMPORT, name], sequence)
    control.ran(device, sequence)
    channel.send([[READY, device, os.getpid()]])
    torch.set_grad_enabled(False)
    ran = control.ran
    while True:
        commands = channel.receive(idle=memory_pool.give_back)
        run = executor.run  # another one while times are wanted
        for command in commands:
            steps = run(command, sequence)
            if steps is not None:
                _drive(steps, communicator, sequence)
            sequence += 1
            if events:
                channel.send(events)
                events.clear()
            ran(device, sequence)


def _drive(steps: Steps, communicator: ProcessGroups, sequence: int) -> None:
    """Run a command that communicates to its end."""
    try:
        request = next(steps)
        while True:
            try:
                result = communicator.carry(*request, sequence)
            except WorkerLost:
                raise
            except Exception as error:  # say, no memory for the result: the command's failure, not the worker's
                request = steps.throw(error)
            else:
                request = steps.send(result)
    except StopIteration:
        pass
