"""The client's own region of the shared memory: tensors on their way to the workers, and the places of those that come back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

import torch

from ..raw import copy
from ..worker.comm.arena import CLIENT, Arena, Region
from .protocol import PUT

_WAITING_BYTES = 1 << 30

Place = list[int]
"""``[offset, bytes]``, as commands carry it."""


class Staging:
    """Blocks of the client's region. Thread-safe.

    A block is free again once every worker has run the last command that may touch it. Nobody tells: whoever needs a block
    looks at how far the workers are.

    Args:
        done: the number of commands that every worker has run.
        wait: block until every worker has run that many commands.
    """

    def __init__(self, fd: int, done: Callable[[], int], wait: Callable[[int], None]) -> None:
        self._arena = Arena(Region(fd, CLIENT))
        self._done = done
        self._wait = wait
        self._lock = threading.Lock()
        self._unsent: set[int] = set()
        self._sent: deque[tuple[int, int, int]] = deque()  # (commands to be run by all, offset, bytes)
        self._waiting = 0

    def stage(self, tensor: torch.Tensor) -> Place:
        """Copy ``tensor`` in. Waits while a GiB of earlier ones is still to be read."""
        nbytes = tensor.nbytes
        while True:
            with self._lock:
                self._reclaim()
                if not self._sent or self._waiting + nbytes <= _WAITING_BYTES:
                    offset = self._arena.allocate(nbytes)
                    memory = self._arena.region.view(offset, tuple(tensor.shape), tensor.dtype)
                    self._unsent.add(offset)
                    break
                target = self._sent[0][0]
            self._wait(target)
        copy(memory, tensor.detach())
        return [offset, nbytes]

    def landing(self, nbytes: int) -> tuple[torch.Tensor, Place]:
        """Space that workers may write to."""
        with self._lock:
            self._reclaim()
            offset = self._arena.allocate(nbytes)
            return self._arena.region.bytes(offset, nbytes), [offset, nbytes]

    def release(self, place: Place, count: int) -> None:
        """Take back a landing once all have run ``count`` commands: a device may still be writing what another has failed to."""
        with self._lock:
            self._retire(count, place)

    def sending(self, commands: Iterable[list], sequence: int) -> None:
        """Note which staged tensors are in ``commands``, the first of which is number ``sequence``."""
        if not self._unsent:
            return
        with self._lock:
            for number, command in enumerate(commands, sequence + 1):
                if command[0] == PUT and isinstance(command[-1], list):
                    self._unsent.discard(command[-1][0])
                    self._retire(number, command[-1])

    def _retire(self, count: int, place: Place) -> None:
        self._sent.append((count, *place))
        self._waiting += place[1]

    def _reclaim(self) -> None:
        done = self._done()
        while self._sent and self._sent[0][0] <= done:
            _, offset, nbytes = self._sent.popleft()
            self._arena.free(offset)
            self._waiting -= nbytes
