"""How workers end: what is told of a death, and an end that was asked for."""

from __future__ import annotations

import contextlib
import select
import signal
import time

from ..errors import WorkerLost
from . import zygote

_TAIL_LINES = 20
#: How long an end that was asked for may take.
END_SECONDS = 0.4


def death(parent: zygote.Zygote, message: dict | None) -> WorkerLost:
    """What to tell of a worker's death, or of the zygote's (no message)."""
    if message is None:
        return WorkerLost(f"the process that starts workers (pid {parent.process.pid}) ended, and they with it")
    if "failed" in message:
        return WorkerLost(f"workers cannot be started: {message['failed']}")
    code = message["code"]
    if code < 0:
        with contextlib.suppress(ValueError):
            code = f"{code} ({signal.Signals(-code).name})"
        how = f"was killed by signal {str(code).lstrip('-')}"
    else:
        how = f"exited with status {code}"
    text = f"worker {message['died']} (pid {message['pid']}) {how}"
    lines = message["tail"].splitlines()[-_TAIL_LINES:]
    if lines:
        text += "; the last lines of its output:\n    " + "\n    ".join(lines)
    return WorkerLost(text)


def end_workers(parent: zygote.Zygote) -> bool:
    """Have the zygote end all workers; whether it did in time."""
    deadline = time.monotonic() + END_SECONDS
    try:
        parent.send({"end": True})
    except OSError:
        return False
    while select.select([parent.socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
        message = parent.receive()
        if message is None:
            return False
        if "ended" in message:
            return True
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP or a debugger."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False
