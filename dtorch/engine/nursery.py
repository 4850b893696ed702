"""The zygote's side: import torch, then fork workers, watch them, pass on what they print, and end with the client.

One thread, no torch op, no zmq context and no CUDA before a fork: a forked process gets none of its parent's threads, and
pools or contexts that count on theirs would hang in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from .zygote import MESSAGE_BYTES

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_TAIL_BYTES = 8192
_BACKLOG_BYTES = 1 << 20
_SOCKET_PATH_BYTES = 80  # of the 108 that Linux allows, leaving room for the file's name


def main(fd: int) -> NoReturn:
    """Run the zygote on its end of the socket."""
    sys.argv = ["dtorch"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    client = socket.socket(fileno=fd)
    with _ends_with(client):
        # OpenBLAS starts its threads when numpy is imported, and a fork would lose them.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        gc.disable()  # what is imported stays: collecting among it took 0.2 of the 1.9 s of `import torch`
        importlib.import_module("dtorch.worker.loop")
    faulthandler.enable()
    _prctl(_PR_SET_NAME, b"dtorch-zygote")
    gc.collect()
    gc.freeze()  # else a worker's first collection copies every page of torch's modules
    gc.enable()
    Nursery(client).run()


@contextlib.contextmanager
def _ends_with(client: socket.socket) -> Any:
    """While this process is too busy importing to look, let the kernel end it (by SIGIO) when the client closes its end."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
    flags = fcntl.fcntl(client, fcntl.F_GETFL)
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([client], [], [], 0)[0]:  # the client says nothing yet: it is gone already
        os._exit(0)
    yield
    fcntl.fcntl(client, fcntl.F_SETFL, flags)
    try:
        client.send(b'{"ready": true}')
    except OSError:
        os._exit(0)


@dataclasses.dataclass(slots=True)
class _Worker:
    device: int
    pid: int
    pidfd: int
    output: int
    tail: bytearray = dataclasses.field(default_factory=bytearray)


class Nursery:
    """The workers of one engine at a time. Requests: ``open``, ``start``, ``end``; see the methods of those names."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._workers: dict[int, _Worker] = {}
        self._directory: str | None = None
        self._memory = -1
        self._lost = False
        self._backlog = bytearray()
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._watch(client.fileno(), self._request)

    def run(self) -> NoReturn:
        while True:
            for fd, _ in self._poll.poll():
                handler = self._handlers.get(fd)  # one earlier in this round may have dropped it
                if handler is not None:
                    handler()

    # Requests of the client

    def _request(self) -> None:
        try:
            packet, fds, _, _ = socket.recv_fds(self._client, MESSAGE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            packet, fds = b"", []
        if not packet:
            self._clear()
            os._exit(0)
        message = json.loads(packet)
        if "open" in message:
            self._open(fds[0])
        elif "start" in message:
            self._start(message["start"], message["settings"])
        else:
            self._clear()
            self._reply({"ended": True})

    def _open(self, memory: int) -> None:
        """A new engine: take its shared memory, make the private directory of its sockets."""
        self._memory = memory
        self._lost = False
        try:
            root = tempfile.gettempdir()
            self._directory = tempfile.mkdtemp(prefix="dtorch-", dir=root if len(root) < _SOCKET_PATH_BYTES else "/tmp")
        except OSError as error:
            self._reply({"failed": f"no place for their sockets: {error}"})
        else:
            self._reply({"directory": self._directory})

    def _start(self, devices: list[int], settings: dict[str, Any]) -> None:
        for device in devices:
            read, write = os.pipe()
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                self._reply({"failed": str(error)})
                return
            if pid == 0:
                self._become_worker(device, write, parent, settings)
            os.close(write)
            os.set_blocking(read, False)
            worker = _Worker(device, pid, os.pidfd_open(pid), read)
            self._workers[device] = worker
            self._watch(worker.pidfd, lambda worker=worker: self._died(worker))
            self._watch(worker.output, lambda worker=worker: self._drain(worker))

    def _clear(self) -> None:
        """End the workers and remove what the engine had."""
        self._kill()
        deadline = time.monotonic() + 1.0
        for worker in self._workers.values():
            left = max(0.0, deadline - time.monotonic())
            if select.select([worker.pidfd], [], [], left)[0]:  # not so while the kernel holds it, as a GPU driver may
                os.waitpid(worker.pid, 0)
            self._drain(worker)
            self._drop(worker)
        self._workers.clear()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _reply(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the client is gone: the next poll says so
            self._client.send(json.dumps(message).encode())

    # Workers

    def _become_worker(self, device: int, output: int, parent: int, settings: dict[str, Any]) -> NoReturn:
        status = 1
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before the signal was asked for
                os._exit(1)
            _prctl(_PR_SET_NAME, f"dtorch-{device}".encode())
            self._client.close()
            for worker in self._workers.values():
                os.close(worker.pidfd)
                os.close(worker.output)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            from ..worker.loop import main as work

            work(device, self._memory, self._directory, **settings)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _died(self, worker: _Worker) -> None:
        """A worker ended. None of the others can go on without it, and one may be waiting for it for ever: end them all."""
        _, status = os.waitpid(worker.pid, 0)
        self._drain(worker)
        self._drop(worker)
        del self._workers[worker.device]
        self._kill()
        if not self._lost:
            self._lost = True
            tail = worker.tail.decode(errors="replace")
            code = os.waitstatus_to_exitcode(status)
            self._reply({"died": worker.device, "pid": worker.pid, "code": code, "tail": tail})

    def _kill(self) -> None:
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _watch(self, fd: int, handler: Callable[[], None], events: int = select.POLLIN) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, events)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def _drop(self, worker: _Worker) -> None:
        for fd in (worker.pidfd, worker.output):
            self._unwatch(fd)
            os.close(fd)

    # What workers print

    def _drain(self, worker: _Worker) -> None:
        """Read what a worker has printed, so that it never blocks on printing; remember the end of it."""
        for _ in range(16):
            try:
                text = os.read(worker.output, 1 << 16)
            except BlockingIOError:
                break
            if not text:
                self._unwatch(worker.output)
                break
            worker.tail += text
            del worker.tail[:-_TAIL_BYTES]
            self._backlog += text
        del self._backlog[:-_BACKLOG_BYTES]
        self._pass_on()

    def _pass_on(self) -> None:
        """Write to the client's stderr what it takes without blocking: 4096 bytes, wherever poll says that it is writable."""
        ready = select.poll()
        ready.register(2, select.POLLOUT)
        try:
            while self._backlog and any(events & select.POLLOUT for _, events in ready.poll(0)):
                del self._backlog[: os.write(2, self._backlog[:4096])]
        except OSError:
            self._backlog.clear()
        if self._backlog:
            self._watch(2, self._pass_on, select.POLLOUT)
        else:
            self._unwatch(2)


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
