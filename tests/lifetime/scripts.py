"""Users' scripts, run as processes of their own: what they print, how they end, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: A deadline that only a hang exceeds.
SECONDS = 90.0
#: How soon a death must be known, and how soon nothing may be left.
SOON = 2.0

PROLOGUE = """\
import os, signal, sys, threading, time
import torch, dtorch
mesh = dtorch.DeviceMesh("cpu", [0, 1])
shard, replicate = [dtorch.Shard(0)], [dtorch.Replicate()]
def say(*words): print(*words, flush=True)
def workers(): return [s.pid for s in dtorch.worker_status().values()]
"""


class Script:
    """A running script, with a temporary directory of its own and a mark by which all its processes are known."""

    def __init__(
        self, code: str, *, how: str = "file", prologue: str = PROLOGUE, under: Sequence[str] = (), **options: Any
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="lifetime-", dir="/tmp"))
        (self.directory / "tmp").mkdir()
        self._mark = f"LIFETIME_TEST_MARK={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        given = {name: value, "TMPDIR": str(self.directory / "tmp"), "PYTHONPATH": str(ROOT), **options.pop("env", {})}
        text = prologue + textwrap.dedent(code)
        self.path = self.directory / "script.py"
        self.path.write_text(text)
        arguments = {"file": [str(self.path)], "stdin": [], "-c": ["-c", text], "-i": ["-i", "-q"]}[how]
        self.process = subprocess.Popen(
            [*under, sys.executable, *arguments],
            cwd=self.directory,
            env={k: v for k, v in {**os.environ, **given}.items() if v is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        if how in ("stdin", "-i"):
            self.process.stdin.write(text)
            self.process.stdin.close()
            self.process.stdin = None

    def line(self) -> str:
        """The next line it prints."""
        return self.process.stdout.readline().rstrip("\n")

    def go(self) -> None:
        """Let its ``sys.stdin.readline()`` return."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[int, str, str]:
        """Wait for its end: status, stdout, stderr."""
        out, err = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, out, err

    def processes(self) -> list[int]:
        """Its living processes, whoever their parent is by now."""
        found = []
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and self._mark.encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
        return found

    def left(self) -> list[str]:
        """The processes and files that it has left behind."""
        # torch makes a directory of its own when torch._dynamo is imported (2.13).
        files = [str(path) for path in (self.directory / "tmp").iterdir() if "torchinductor" not in path.name]
        files += [str(path) for path in Path("/dev/shm").glob("*dtorch*")]
        return [f"process {pid}" for pid in self.processes()] + files

    def close(self) -> None:
        """End whatever still runs."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.communicate()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def running(code: str, **options: Any) -> Iterator[Script]:
    """A `Script` that is ended in the end."""
    script = Script(code, **options)
    try:
        yield script
    finally:
        script.close()


def run(code: str, **options: Any) -> tuple[int, str, str]:
    """Run a script to its end: status, stdout, stderr. It must leave nothing behind."""
    with running(code, **options) as script:
        result = script.finish()
        assert until(lambda: not script.left(), SOON), script.left()
        return result


def succeeds(code: str, **options: Any) -> str:
    """Run a script that ends with status 0, says nothing on stderr and leaves nothing behind; what it printed."""
    status, out, err = run(code, **options)
    assert (status, err) == (0, ""), (status, out, err)
    return out


def until(true: Callable[[], Any], seconds: float = SECONDS, step: float = 0.02) -> bool:
    """Whether ``true()`` becomes so within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(step)
    return True


def forever(call: Callable[[], Any]) -> None:
    """Call again and again, until it raises; a test that forgets to end it fails."""
    assert until(lambda: call() is call, step=0)
