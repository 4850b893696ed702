"""The client's own region of the shared memory: tensors on their way to the workers, and the places of those that come back."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch

from .. import memory_pool
from ..errors import DTorchError, WorkerLost
from ..interrupts import critical
from ..raw import copy
from ..worker.comm import ring
from ..worker.comm.arena import CLIENT, KEPT_BYTES, Arena, Region, size_of
from ..worker.comm.control import Control
from .protocol import PUT

log = logging.getLogger("dtorch")

_WAITING_BYTES = 1 << 30
#: Seconds that a fork waits for whoever is at the blocks. Only a fork in a signal handler that interrupted him waits so long.
_FORK_SECONDS = 1.0
_IDLE_SECONDS = 100e-6

Place = list[int]
"""``[offset, bytes]``, as commands carry it."""


@dataclasses.dataclass(slots=True)
class _Lent:
    """A landing that is a tensor of the user's now.

    Attributes:
        count: all must have run so many commands before the block is used again.
        memory: the block, where the tensor has it.
        owned: it was made private before a fork: its memory is the tensor's alone, the block's is gone.
        stuck: that was not possible, and a forked child may see the block: it is not used again.
    """

    place: Place
    count: int
    memory: torch.Tensor
    owned: bool = False
    stuck: bool = False


class Workers(Protocol):
    """What the engine tells."""

    sequence: int
    """The number of commands sent."""

    def done(self) -> int:
        """The number of commands that every worker has run."""

    def wait_until_run(self, count: int) -> None:
        """Block until every worker has run ``count`` commands."""

    def lose(self, error: Exception) -> None:
        """Say that the cluster is unusable."""


class Staging:
    """Blocks of the client's region. Thread-safe.

    A block is free again once every worker has run the last command that may touch it. Nobody tells: whoever needs a block
    looks at how far the workers are.

    A large landing is not copied out: it is lent to the user, as the memory of the result, and comes back when that dies. But a
    new block's pages cost four times what private ones, huge pages, do: a loop that keeps its results gets copies. The pool of private
    memory tells: where a result of about that size has died, its memory is given up, and the landing lent instead. A forked child
    must not see what its parent does to a result, nor the other way round: before a fork what is lent becomes private.

    A large tensor that each device wants a part of is not copied in as a whole, if they have nothing else to do: they copy out meanwhile
    (`dtorch.worker.comm.ring`).
    """

    def __init__(self, fd: int, control: Control, engine: Workers) -> None:
        fd = os.dup(fd)  # what is lent may outlive the engine
        weakref.finalize(self, os.close, fd).atexit = False
        self._arena = Arena(Region(fd, CLIENT))
        self._control = control
        self._engine = engine
        self._lock = threading.Lock()
        self._unsent: set[int] = set()
        self._sent: deque[tuple[int, int, int]] = deque()  # (commands to be run by all, offset, bytes)
        self._waiting = 0
        self._lent: dict[int, _Lent] = {}
        self._dead: deque[int] = deque()
        #: By size, how many more blocks may be lent for private memory that was given up.
        self._lendable: dict[int, int] = defaultdict(int)
        self._pouring = threading.Lock()  # held by whoever fills the ring
        self._source: ring.Source | None = None
        self._pid = os.getpid()
        self._closed = False
        self._locked = False
        _stagings.add(self)

    def stage(self, tensor: torch.Tensor) -> Place:
        """Copy ``tensor`` in. Waits while a GiB of earlier ones is still to be read."""
        place = self._block(tensor.nbytes)
        with self._lock:
            memory = self._arena.region.view(place[0], tuple(tensor.shape), tensor.dtype)
        copy(memory, tensor.detach())
        return place

    def bring(self, tensor: torch.Tensor, devices: Sequence[int], send: Callable[[Any, bool], None]) -> None:
        """See `dtorch.engine.interface.Engine.stage`."""
        if devices and tensor.nbytes >= ring.SMALLEST_BYTES and self._pouring.acquire(blocking=False):
            try:
                if self._are_idle():
                    self._pour(tensor, devices, send)
                    return
            finally:
                self._pouring.release()
        send(self.stage(tensor), False)

    def _are_idle(self) -> bool:
        """Whether all workers have run everything sent. They reply to a command a moment before they say that they have run it."""
        if self._closed:
            return False
        deadline = time.perf_counter() + _IDLE_SECONDS
        while self._engine.done() < self._engine.sequence:
            if time.perf_counter() > deadline:
                return False
            os.sched_yield()
        return True

    @critical  # else Ctrl-C would leave workers waiting for the rest
    def _pour(self, tensor: torch.Tensor, devices: Sequence[int], send: Callable[[Any, bool], None]) -> None:
        place = self._block(tensor.nbytes)
        with self._lock:
            region = self._arena.region
            if self._source is None:
                self._source = ring.Source(self._control, region, self._arena.allocate(ring.RING_BYTES))
            source, block = self._source, region.bytes(*place)
        send(source.reference(place), True)
        try:
            source.pour(tensor, block, devices)
        except BaseException as error:
            self._engine.lose(WorkerLost(f"interrupted while a value was being sent: {error!r}"))
            raise

    def _block(self, nbytes: int) -> Place:
        """Space for a PUT. Waits while a GiB of earlier ones is still to be read."""
        while True:
            with self._lock:
                if self._closed:
                    raise DTorchError("the cluster was shut down")
                self._reclaim()
                if not self._sent or self._waiting + nbytes <= _WAITING_BYTES:
                    offset = self._arena.allocate(nbytes)
                    self._unsent.add(offset)
                    return [offset, nbytes]
                target = self._sent[0][0]
            self._engine.wait_until_run(target)

    def landing(self, nbytes: int) -> Place:
        """Space that workers may write to."""
        with self._lock:
            self._reclaim()
            offset = self._arena.allocate(nbytes)
            self._arena.region.bytes(offset, nbytes)  # mapped from here on
            return [offset, nbytes]

    def landed(self, place: Place, shape: Sequence[int], dtype: torch.dtype, count: int) -> torch.Tensor:
        """What workers have written there, as a tensor of its own; the landing comes back as by `release`."""
        offset, nbytes = place
        with self._lock:
            region = self._arena.region
            if self._may_lend(nbytes):
                lease = region.leased(offset, size_of(nbytes), functools.partial(self._died, offset))
                self._lent[offset] = _Lent(place, count, region.bytes(offset, size_of(nbytes)))
                return torch.frombuffer(lease, dtype=dtype, count=math.prod(shape)).view(tuple(shape))
            memory = region.bytes(offset, nbytes)
        result = memory_pool.empty(shape, dtype)
        copy(result, memory.view(dtype).view(tuple(shape)))
        self.release(place, count)
        return result

    def _may_lend(self, nbytes: int) -> bool:
        size = size_of(nbytes)
        if nbytes < memory_pool.SMALLEST_BYTES or self._closed:
            return False
        if size > KEPT_BYTES:  # no memory of so many bytes is kept anywhere: new pages once are better than twice
            return True
        if self._lendable[size]:
            self._lendable[size] -= 1
            return True
        return memory_pool.give_up(size)

    def _died(self, offset: int) -> None:
        # A finalizer: in any thread, even of one that holds the lock, and at any time, even after a fork, when the blocks are the parent's.
        self._dead.append(offset)
        if os.getpid() == self._pid and self._lock.acquire(blocking=False):
            try:
                self._reclaim()
            finally:
                self._lock.release()

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
                    self._retire(number, command[-1][:2])

    def close(self) -> None:
        """All workers have ended: what is lent is all that stays."""
        with self._lock:
            self._closed = True
            self._reclaim()
            del self._engine, self._control
            self._source = None
            kept = [(offset, size_of(lent.place[1])) for offset, lent in self._lent.items() if not lent.owned]
            if kept:
                self._arena.region.leave_only(kept)

    def _retire(self, count: int, place: Place) -> None:
        self._sent.append((count, *place))
        self._waiting += place[1]

    def _reclaim(self) -> None:
        while self._dead:
            self._take_back(self._lent.pop(self._dead.popleft()))
        if self._closed or not self._sent:
            return
        done = self._engine.done()
        while self._sent and self._sent[0][0] <= done:
            _, offset, nbytes = self._sent.popleft()
            self._arena.free(offset)
            self._waiting -= nbytes

    def _take_back(self, lent: _Lent) -> None:
        region, (offset, nbytes) = self._arena.region, lent.place
        size = size_of(nbytes)
        if lent.stuck:
            return
        if self._closed:
            if not lent.owned:
                region.give_up(offset, size)
            return
        if not lent.owned:
            self._lendable[size] += 1
        elif not region.make_shared(lent.memory, offset):
            return
        self._retire(lent.count, lent.place)

    def before_fork(self) -> None:
        """Make what is lent private, and let no thread change anything until `after_fork`."""
        self._locked = self._lock.acquire(timeout=_FORK_SECONDS)
        for offset, lent in list(self._lent.items()):
            if not (lent.owned or lent.stuck):
                lent.stuck = True
                try:
                    lent.owned = self._arena.region.make_private(lent.memory, offset)
                except OSError as error:
                    log.error("dtorch: a forked child shares the memory of what to_torch() returned: %s", error)
                lent.stuck = not lent.owned

    def after_fork(self) -> None:
        """The end of `before_fork`, in parent and child."""
        if self._locked:
            self._locked = False
            self._lock.release()


_stagings: weakref.WeakSet[Staging] = weakref.WeakSet()


def _before_fork() -> None:
    for staging in list(_stagings):
        staging.before_fork()


def _after_fork() -> None:
    for staging in list(_stagings):
        staging.after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
