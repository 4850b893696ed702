"""A trace file out of what a `Timing` knows: Chrome's trace event format, which https://ui.perfetto.dev opens.

Process 0 is the client, with a track for each thread; process 1 + d is the worker of device d. An arrow leads from the issue of a command
to each of its runs. Spans carry the user's line.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

from ..client import lines
from ..engine import protocol
from ..program.ir import ReshardStart, ShiftDone
from ..worker.tracing import AFTER_FAILURE, WHOLE
from .communication import Communication
from .timing import COMMANDS, Call, Issue, Run, Runs, Timing, program_called

CLIENT = 0


def write(file: IO[str], timing: Timing, runs: Runs) -> None:
    """Write it all; one event a line."""
    left_out = {"left_out_client": timing.left_out, "left_out_workers": runs.left_out}
    about = {"clock": "CLOCK_MONOTONIC", "begun_ns": timing.since, **left_out}
    file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n')
    file.write(",\n".join(map(json.dumps, events(timing, runs))))
    file.write("\n]}\n")


def events(timing: Timing, runs: Runs) -> Iterator[dict[str, Any]]:
    """All events. Times are microseconds since the beginning."""
    yield _named("process_name", CLIENT, 0, "client")
    threads: dict[int, int] = {}
    for call in timing.calls:
        if call.start >= timing.since:
            if call.thread not in threads:
                threads[call.thread] = len(threads)
                yield _named("thread_name", CLIENT, threads[call.thread], f"thread {len(threads)}")
            yield _of_call(call, threads[call.thread], timing)
    issues = {issue.sequence: issue for issue in timing.issues if issue.controller is runs.controller}
    devices = sorted({run.device for run in runs.notes})
    for device in devices:
        yield _named("process_name", 1 + device, 0, f"worker {device}")
    kept = {id(call) for call in timing.calls}
    names = _Names(runs, issues)
    for run in runs.notes:
        issue = issues.get(run.sequence)
        if run.kind != protocol.TRACE:
            yield _of_run(run, issue, names, timing)
        if issue is not None and issue.call is not None and id(issue.call) in kept and run.instruction == WHOLE:
            arrow = {"name": "issued", "cat": "issued", "id": run.sequence * (devices[-1] + 1) + run.device}
            start = {"ph": "s", "pid": CLIENT, "tid": threads[issue.call.thread], "ts": _us(issue.at, timing)}
            yield {**arrow, **start}
            yield {**arrow, "ph": "f", "bp": "e", "pid": 1 + run.device, "tid": 0, "ts": _us(run.start, timing)}


class _Names:
    """What to call the spans of workers."""

    def __init__(self, runs: Runs, issues: dict[int, Issue]) -> None:
        self._controller = runs.controller
        self._issues = issues
        self._communication: dict[int, dict[int, Communication]] = {}

    def of(self, run: Run) -> str:
        if run.instruction != WHOLE:
            return self._of_instruction(run)
        issue = self._issues.get(run.sequence)
        if issue is not None:
            return issue.name
        if run.kind < protocol.FIRST_PROGRAM:
            return COMMANDS[run.kind]
        return program_called(self._controller, run.kind).name  # type: ignore[arg-type]

    def _of_instruction(self, run: Run) -> str:
        if run.instruction == AFTER_FAILURE:
            return "after a failure"
        instruction = program_called(self._controller, run.kind).body[run.instruction]  # type: ignore[arg-type]
        if isinstance(instruction, ShiftDone):
            return "shift arrives"
        if type(instruction) is ReshardStart:
            return "exchange begins"
        found = self.communication(run)
        return "exchange" if found is None else found.kind

    def communication(self, run: Run) -> Communication | None:
        """What the instruction communicates, where the operands are known."""
        issue = self._issues.get(run.sequence)
        if issue is None:
            return None
        if run.sequence not in self._communication:
            self._communication[run.sequence] = issue.communication()
        return self._communication[run.sequence].get(run.instruction)


def _of_call(call: Call, thread: int, timing: Timing) -> dict[str, Any]:
    where = {} if call.outer is not None else {"args": {"line": lines.text(call.where)}}
    return _span(str(call.what), "client", CLIENT, thread, call.start, call.stop, timing) | where


def _of_run(run: Run, issue: Issue | None, names: _Names, timing: Timing) -> dict[str, Any]:
    told: dict[str, Any] = {"sequence": run.sequence}
    if issue is not None:
        told["line"] = lines.text(issue.where)
    category = "program" if run.kind >= protocol.FIRST_PROGRAM else "command"
    if run.instruction != WHOLE:
        category = "communication"
        found = names.communication(run)
        if found is not None:
            told |= {"bytes": found.nbytes, "axes": list(found.axes), "asked for": found.asked_for}
    span = _span(names.of(run), category, 1 + run.device, 0, run.start, run.stop, timing)
    return span | {"args": told}


def _span(name: str, category: str, process: int, thread: int, start: int, stop: int, timing: Timing) -> dict[str, Any]:
    where = {"pid": process, "tid": thread, "ts": _us(start, timing), "dur": (stop - start) / 1000}
    return {"name": name, "cat": category, "ph": "X", **where}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _us(nanoseconds: int, timing: Timing) -> float:
    return (nanoseconds - timing.since) / 1000
