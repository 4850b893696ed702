"""The zygote as the client sees it: a child process that has torch in memory and forks workers on request.

`start` is called by ``dtorch/__init__`` before it imports torch, so that both imports run side by side; it needs only the
standard library and returns at once. What the child does is in `dtorch.engine.nursery`.

The socket between the two is the zygote's lifeline: when the client ends, however it ends, the zygote sees it close and takes
everything down. So nobody else may hold the client's end open: it is close-on-exec, and a forked child closes it first thing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

# The stub package lets the child import `dtorch.worker` and the rest without running `dtorch/__init__`, which would load the
# client, patch torch and start a zygote of its own.
_BOOTSTRAP = """
import json, sys, types
fd, package, sys.path[:] = json.loads(sys.argv.pop())
stub = types.ModuleType("dtorch")
stub.__path__ = [package]
sys.modules["dtorch"] = stub
from dtorch.engine.nursery import main
main(fd)
"""

MESSAGE_BYTES = 1 << 16
_EXIT_SECONDS = 1.0

_lock = threading.Lock()
_spare: Zygote | None = None
_living: weakref.WeakSet[Zygote] = weakref.WeakSet()


class Zygote:
    """A running zygote. Messages are JSON objects, each one packet, with file descriptors beside them.

    The client speaks only after `wait_ready`: until then, the zygote's one concern with the socket is whether it closes.
    """

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False
        package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, json.dumps([theirs.fileno(), package, import_path()])],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "GLIBC_TUNABLES": _tunables()},
                start_new_session=True,  # so that Ctrl-C and a closing terminal reach the client only
            )
        _living.add(self)

    def wait_ready(self) -> None:
        """Block until the zygote has imported torch. A Ctrl-C leaves it as it was: its word is looked at, `receive` takes it."""
        if not self._ready:
            try:
                said = self.socket.recv(MESSAGE_BYTES, socket.MSG_PEEK)
            except OSError:
                said = b""
            if not said:
                raise OSError(
                    f"dtorch: the process that starts workers (pid {self.process.pid}) ended before it was ready"
                )
            self._ready = True

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        socket.send_fds(self.socket, [json.dumps(message).encode()], list(fds))

    def receive(self) -> dict[str, Any] | None:
        """The next message but the word that it is ready; None once the zygote is gone."""
        while True:
            try:
                packet = self.socket.recv(MESSAGE_BYTES)
            except OSError:
                return None
            if not packet:
                return None
            message = json.loads(packet)
            if "ready" not in message:
                return message

    def stop(self) -> None:
        """End the zygote and all that it started."""
        self.socket.close()
        try:
            self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its workers follow it: parent-death signal
            self.process.wait()


def _tunables() -> str:
    """Have the workers' malloc ask for huge pages: a fresh tensor of 50 MB takes 16 ms to write then, not 34 (warm: 8)."""
    given = os.environ.get("GLIBC_TUNABLES")
    ours = "glibc.malloc.hugetlb=1"
    return f"{given}:{ours}" if given else ours


def import_path() -> list[str]:
    """``sys.path`` as another process may use it."""
    return [os.path.abspath(entry) for entry in sys.path]


def start() -> None:
    """Start a spare zygote now, where one is likely to be needed; elsewhere `take` starts it at first need."""
    global _spare
    wanted = sys.platform == "linux" and os.environ.get("DTORCH_ENGINE") != "simulate" and not _multiprocessing_child()
    with _lock:
        if wanted and _spare is None:
            with contextlib.suppress(OSError):  # an import must not fail for this; `take` will say what is wrong
                _spare = Zygote()


def take() -> Zygote:
    """A zygote that is ready, for the caller alone: the spare one, or a new one."""
    global _spare
    with _lock:
        found, _spare = _spare, None
    if found is None or found.process.poll() is not None:
        found = Zygote()
    try:
        found.wait_ready()
    except KeyboardInterrupt:
        give_back(found)
        raise
    return found


def give_back(zygote: Zygote) -> None:
    """Keep a zygote without workers for the next `take`."""
    global _spare
    with _lock:
        if _spare is None:
            _spare = zygote
            return
    zygote.stop()


def stop() -> None:
    """End the spare zygote, if there is one."""
    global _spare
    with _lock:
        found, _spare = _spare, None
    if found is not None:
        found.stop()


def _multiprocessing_child() -> bool:
    """Whether this process belongs to a `multiprocessing` pool, also while it is still importing the user's main module."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return False
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def _forget_in_child() -> None:
    global _spare, _lock
    _lock = threading.Lock()
    _spare = None
    for zygote in list(_living):
        zygote.socket.close()


os.register_at_fork(after_in_child=_forget_in_child)
# Registered before torch's and the client's own exit handlers, so it runs after them.
atexit.register(stop)
