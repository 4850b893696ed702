"""Runs slices in processes of their own: an op that kills or hangs its process is recorded, and the rest goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from .outcome import Outcome, Tally

SILENT = 600
"""Seconds without a finished name after which a process has hung."""


def run(jobs: int, results: Path, resume: bool, arguments: list[str]) -> Tally:
    """Run ``arguments`` cut into ``jobs`` slices; gather what they found in ``results``."""
    parts = [results.with_name(f"{results.name}.{index}") for index in range(jobs)]
    results.parent.mkdir(parents=True, exist_ok=True)
    if not resume:
        for part in (results, *parts):
            part.unlink(missing_ok=True)
    slices = [_Slice(part, index, jobs, arguments) for index, part in enumerate(parts)]
    busy = slices
    while busy := [one for one in busy if one.tend()]:
        time.sleep(1.0)
        done = sum(len(Tally().load(part)) for part in parts)
        if sys.stderr.isatty():
            print(f"\r{done} names finished", end="", file=sys.stderr, flush=True)
    tally = Tally()
    for part in parts:
        tally.load(part)
    results.write_text("".join(json.dumps(tally.record(name)) + "\n" for name in sorted(tally.counts)))
    return tally


class _Slice:
    """One process, started again after each name that ends it."""

    def __init__(self, part: Path, index: int, jobs: int, arguments: list[str]) -> None:
        self.part = part
        self.command = [sys.executable, "-W", "ignore", "-m", "tests.conformance", *arguments, "--jobs", "0", "--quiet"]
        self.command += ["--resume", "--json", str(part), "--slice", f"{index}/{jobs}"]
        self.log = part.with_name(part.name + ".log").open("a")
        self._start()

    def _start(self) -> None:
        with self.part.open("a") as file:
            file.write("{}\n")  # what a slice before this one said does not count
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL)
        self.since = time.monotonic()
        self.size = -1

    def tend(self) -> bool:
        """See to the process; whether there is more to come."""
        code = self.process.poll()
        if code is None:
            size = self.part.stat().st_size if self.part.exists() else 0
            if size != self.size:
                self.since, self.size = time.monotonic(), size
            if time.monotonic() - self.since < SILENT:
                return True
            self.process.kill()
            code = self.process.wait()
        last = self._last()
        if last == {"finished": True}:
            return False
        name = last.get("started")
        if name is None:
            raise RuntimeError(f"a slice ended with status {code} between two names; see {self.log.name}")
        tally = Tally()
        tally.add([Outcome(name, "raised", "process", detail=f"the process ended with status {code}")])
        with self.part.open("a") as file:
            file.write("\n" + json.dumps(tally.record(name)) + "\n")
        self._start()
        return True

    def _last(self) -> dict:
        """The last whole line of the results."""
        last: dict = {}
        for line in self.part.read_text().splitlines() if self.part.exists() else ():
            try:
                last = json.loads(line)
            except json.JSONDecodeError:
                continue
        return last
