"""The engine of real worker processes on this machine."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..errors import DeviceUnavailable, DTorchError, WorkerLost
from ..worker.comm.arena import create_segment, free_bytes
from ..worker.comm.control import Control
from . import zygote
from .channel import ClientChannel
from .endings import END_SECONDS, death, end_workers, is_stopped
from .interface import EventHandler, LostHandler
from .protocol import READY
from .staging import Place, Staging

log = logging.getLogger("dtorch")

_PATIENCE_SECONDS = 5.0
#: The zygote is looked at this often even if no poll says so. A precaution: once in 171 kills on a loaded machine the loss was told
#: after 5 s, when a poll used to end; why is not known.
_LOOK_SECONDS = 1.0


class LocalEngine:
    """Worker processes, one per device index, that start as meshes need them. See `dtorch.engine.interface.Engine`.

    Args:
        devices: how many workers there may be; their ids are below it.
        threads_per_worker: torch threads.
        worker_imports: modules that each worker imports before anything else.
        arena_bytes: of shared memory for what each worker lets others read; None: no limit.
    """

    def __init__(
        self,
        on_event: EventHandler,
        on_lost: LostHandler,
        *,
        devices: int = 64,
        threads_per_worker: int = 1,
        worker_imports: Sequence[str] = (),
        arena_bytes: int | None = None,
    ) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._devices = devices
        self._threads = threads_per_worker
        self._imports = list(worker_imports)
        self._arena_bytes = arena_bytes
        self._is_shared = True
        #: Process ids of the running workers, by device.
        self.pids: dict[int, int] = {}
        self._running: tuple[int, ...] = ()
        #: The number of commands sent.
        self.sequence = 0
        self._batch = 0
        self._slowest = 0
        self._turn = 0
        self._lock = threading.Lock()  # around what is sent
        self._targets: list[int] = []
        self._targets_lock = threading.Lock()
        self._ready = threading.Event()
        self._unusable: Exception | None = None
        self._closed = False
        self._closing = threading.RLock()  # a signal handler may close while closing
        self._zygote: zygote.Zygote | None = None
        self._staging: Staging | None = None
        _engines.add(self)

    # Starting

    def ensure(self, device_type: str, device_ids: Sequence[int]) -> None:
        self._check()
        self._check_devices(device_type, device_ids)
        with self._lock:
            new = [device for device in device_ids if device not in self.pids]
            if not new:
                return
            if self._zygote is None:
                self._is_shared = self._arena_bytes is None or _has_room(self._arena_bytes, len(new))
                self._open()
            settings = {
                "devices": self._devices,
                "batch": self._batch,
                "sequence": self.sequence,
                "threads": self._threads,
                "path": zygote.import_path(),
                "imports": self._imports,
                "arena_bytes": self._arena_bytes,
                "is_shared": self._is_shared,
            }
            try:
                self._zygote.send({"start": new, "settings": settings})  # type: ignore[union-attr]
            except OSError as error:
                raise WorkerLost(f"the process that starts workers is gone: {error}") from None
            self._await_start(new)
            self._running = tuple(self.pids)
            log.debug("workers: %s", ", ".join(f"{device} (pid {pid})" for device, pid in self.pids.items()))

    def _check_devices(self, device_type: str, device_ids: Sequence[int]) -> None:
        largest = max(device_ids)
        if largest >= self._devices:
            raise DeviceUnavailable(
                f"{device_type}:{largest} is beyond the limit of {self._devices} workers; "
                f"dtorch.init(devices={largest + 1}) or DTORCH_DEVICES={largest + 1} raises it"
            )
        if device_type == "cuda":
            if not torch.cuda.is_available():
                raise DeviceUnavailable(
                    f"cuda:{device_ids[0]} does not exist here, only cpu devices do: torch.cuda.is_available() is False"
                )
            count = torch.cuda.device_count()
            missing = [device for device in device_ids if device >= count]
            if missing:
                raise DeviceUnavailable(f"cuda:{missing[0]} does not exist here: there are {count} cuda devices")

    def _open(self) -> None:
        parent = zygote.take()
        self._fd = create_segment(self._devices)
        parent.send({"open": True}, [self._fd])
        opened = parent.receive()
        if opened is None or "failed" in opened:
            os.close(self._fd)
            parent.stop()
            raise death(parent, opened)
        self._control = Control(self._fd, self._devices)
        self._control.wake_client_at(None)
        self._staging = Staging(self._fd, self._control, self)
        self._directory = opened["directory"]
        try:
            self._channel = ClientChannel(self._directory)
        except BaseException:
            self._staging = None
            os.close(self._fd)
            parent.stop()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._receive, name="dtorch-events", daemon=True)
        self._zygote = parent
        self._thread.start()

    def _await_start(self, new: list[int]) -> None:
        """Return when all of ``new`` have subscribed to the channel and say that they are ready."""
        subscribed = 0
        interrupted: KeyboardInterrupt | None = None
        while subscribed < len(new) or not all(device in self.pids for device in new):
            self._check()
            try:
                if subscribed < len(new):
                    subscribed += self._channel.subscribed(0.05)
                else:
                    self._ready.wait(0.05)
                    self._ready.clear()
            except KeyboardInterrupt as interrupt:
                # Half-started workers would miss commands. They need a moment; a second Ctrl-C says that it is too long.
                if interrupted:
                    self.lose(WorkerLost("interrupted while workers were starting"))
                interrupted = interrupt
        if interrupted:
            raise interrupted

    # Sending

    def send(self, commands: list[list]) -> None:
        self._check()
        with self._lock:
            if self._zygote is None:
                self.sequence += len(commands)
                return
            try:
                self._staging.sending(commands, self.sequence)  # type: ignore[union-attr]
                self.sequence += len(commands)
                self._channel.send(self._batch, commands)
                self._batch += 1
            except BaseException as error:
                # Whether the workers have these commands is not known: better an end than a wrong value.
                self.lose(WorkerLost(f"interrupted while commands were being sent: {error!r}"))
                raise

    def behind(self) -> int:
        # One worker that was slow, and one more in turn: the cost does not grow with their number, and a slow one is soon found.
        running = self._running
        if not running:
            return 0
        progress, sequence = self._control.progress, self.sequence
        self._turn = turn = (self._turn + 1) % len(running)
        lag = sequence - progress[self._slowest]
        other = sequence - progress[running[turn]]
        if other > lag:
            self._slowest = running[turn]
            return other
        return lag

    def wait_behind(self, limit: int) -> None:
        self._wait_until(self.sequence - limit)

    def _wait_until(self, count: int) -> None:
        """Sleep until every worker has run ``count`` commands, or the cluster is unusable."""
        if not self._running:
            return
        control = self._control
        with self._woken_at(count):
            for device in self._running:
                while control.progress[device] < count and self._unusable is None:
                    control.await_progress(device, count)

    def wait_until_run(self, count: int) -> None:
        """Sleep until every worker has run ``count`` commands; WorkerLost if that will not be."""
        self._wait_until(count)
        self._check()

    @contextlib.contextmanager
    def _woken_at(self, count: int) -> Iterator[None]:
        with self._targets_lock:
            self._targets.append(count)
            self._control.wake_client_at(min(self._targets))
        try:
            yield
        finally:
            with self._targets_lock:
                self._targets.remove(count)
                self._control.wake_client_at(min(self._targets, default=None))

    def done(self) -> int:
        """The number of commands that every worker has run."""
        progress = self._control.progress
        return min(progress[device] for device in self._running)

    # Bytes

    def stage(self, tensor: torch.Tensor, devices: Sequence[int], send: Callable[[Any, bool], None]) -> None:
        self._check()
        self._staging.bring(tensor, devices, send)  # type: ignore[union-attr]

    def landing(self, nbytes: int) -> Place:
        self._check()
        return self._staging.landing(nbytes)  # type: ignore[union-attr]

    def landed(self, landing: Place, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return self._staging.landed(landing, shape, dtype, self.sequence)  # type: ignore[union-attr]

    def release(self, landing: Place) -> None:
        staging = self._staging
        if staging is not None:
            staging.release(landing, self.sequence)

    # Receiving

    def _receive(self) -> None:
        looked, seen = time.monotonic(), -1
        parent = self._zygote
        assert parent is not None
        while not self._closed:
            ready = self._channel.wait([parent.socket.fileno(), self._wake], _LOOK_SECONDS)
            while not self._closed and (events := self._channel.receive()):
                for event in events:
                    self._take(event)
            if self._closed:
                return
            if parent.socket.fileno() in ready:
                self.lose(death(parent, parent.receive()))
                return
            if time.monotonic() - looked > _PATIENCE_SECONDS:
                done = self.done() if self._running else 0
                if done == seen and done < self.sequence:
                    self._warn()
                looked, seen = time.monotonic(), done

    def _take(self, event: list) -> None:
        if event[0] == READY:
            self.pids[event[1]] = event[2]
            self._ready.set()
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("dtorch: an event could not be handled: %s", event)

    def lose(self, error: Exception) -> None:
        """The cluster is unusable from here on."""
        if self._unusable is None:
            self._unusable = error
            self._on_lost(error)

    def unresponsive(self) -> list[int]:
        """The devices whose workers are stopped (SIGSTOP, a debugger): not dead, but nothing will come from them."""
        return [device for device in self._running if is_stopped(self.pids[device])]

    def workers(self) -> dict[int, tuple[int, int, str]]:
        running = self._running
        if self._unusable is not None:
            return {device: (self.pids[device], 0, "lost") for device in running}
        stopped = self.unresponsive()
        return {
            device: (
                self.pids[device],
                self.sequence - self._control.progress[device],
                "stopped" if device in stopped else "running",
            )
            for device in running
        }

    def _warn(self) -> None:
        stopped = self.unresponsive()
        if stopped:
            names = ", ".join(f"{device} (pid {self.pids[device]})" for device in stopped)
            log.warning("dtorch: still waiting for worker %s, which is stopped; SIGCONT lets it go on", names)

    def _check(self) -> None:
        error = self._unusable
        if error is not None:
            # A new one each time: a raised exception holds its frames, and so the engine and its memory.
            raise type(error)(*error.args)

    # Ending

    def close(self) -> None:
        if isinstance(self._unusable, _Forked):
            return
        with self._closing:  # a second caller returns when the first is done
            if self._closed:
                return
            self._closed = True
            if self._unusable is None:
                self._unusable = DTorchError("the cluster was shut down")
            # Whoever sends or starts workers sees that the engine is unusable, and lets go.
            locked = self._lock.acquire(timeout=END_SECONDS)
            try:
                if self._zygote is not None:
                    self._end(self._zygote)
            finally:
                if locked:
                    self._lock.release()

    def _end(self, parent: zygote.Zygote) -> None:
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(END_SECONDS)
        if end_workers(parent):
            zygote.give_back(parent)
        else:
            parent.stop()
            shutil.rmtree(self._directory, ignore_errors=True)
        self._channel.close()
        self._running = ()
        if self._staging is not None:
            self._staging.close()
        self._staging = None  # its memory goes with it, unless the caller still has some of it
        os.close(self._wake)
        os.close(self._fd)
        # The controller holds this engine: without the way back both go at once, and the shared memory with them, not at some collection.
        self._on_event = self._on_lost = _nobody


def _has_room(arena_bytes: int, workers: int) -> bool:
    """Whether there is memory for so large an arena of each worker; warns if not."""
    free = free_bytes()
    if arena_bytes * workers <= free:
        return True
    warnings.warn(
        f"no room in shared memory for {arena_bytes} bytes of each of {workers} workers, {free} are free: they send over gloo, which is "
        "several times slower; dtorch.init(arena_bytes=…) or DTORCH_ARENA_BYTES makes the arenas smaller",
        stacklevel=2,
    )
    return False


def _nobody(_: object) -> None:
    """Who is told of events when there is no controller any more."""


class _Forked(DTorchError):
    """What a forked child gets."""


_engines: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _disable_in_child() -> None:
    for engine in list(_engines):
        engine._unusable = _Forked(
            "a forked process cannot use dtorch tensors of its parent, nor its workers; "
            "convert with to_torch() before the fork, or start the process with 'spawn'"
        )


os.register_at_fork(after_in_child=_disable_in_child)
