"""The tables of `Recording.summary`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..client import lines
from ..worker.tracing import WHOLE
from .communication import Communication
from .timing import Call, Issue, Runs

#: Rows of ops at most; the others are added up.
LISTED = 24


@dataclass(slots=True)
class _Row:
    """Ops of one name from one line. Nanoseconds; of workers by device."""

    count: int = 0
    client: int = 0
    worker: Counter[int] = field(default_factory=Counter)
    moving: Counter[int] = field(default_factory=Counter)
    nbytes: int = 0

    def add(self, other: _Row) -> None:
        self.count += other.count
        self.client += other.client
        self.worker.update(other.worker)
        self.moving.update(other.moving)
        self.nbytes += other.nbytes

    def cells(self, known: bool) -> list[str]:
        busiest = max(self.worker, key=self.worker.__getitem__, default=0)
        workers = [_milliseconds(of[busiest]) if known else "-" for of in (self.worker, self.moving)]
        return [str(self.count), _milliseconds(self.client), *workers, f"{self.nbytes:,}"]


def of_ops(issues: Sequence[Issue], nbytes: Sequence[int], calls: Iterable[Call], runs: Runs) -> list[str]:
    """Per op and line: how often, milliseconds of the client and of the worker that it took longest, and how many of these went by
    moving data and waiting for whom it came from; the bytes that the device received that received most.

    Args:
        issues: those of ops; ``nbytes`` of each.
    """
    client, others = client_time(issues, calls)
    by_sequence: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    for run in runs.notes:
        by_sequence[run.sequence].append((run.device, run.stop - run.start, run.instruction == WHOLE))
    rows: dict[tuple[str, str], _Row] = defaultdict(_Row)
    for issue, nanoseconds, received in zip(issues, client, nbytes, strict=True):
        row = rows[issue.name, lines.text(issue.where)]
        row.count += 1
        row.client += nanoseconds
        row.nbytes += received
        if issue.controller is runs.controller:  # else of an earlier cluster
            for device, spent, whole in by_sequence.get(issue.sequence, ()):
                (row.worker if whole else row.moving)[device] += spent
    ordered = sorted(rows.items(), key=lambda item: (-max(item[1].worker.values(), default=0), -item[1].client))
    known = runs.controller is not None
    cells = [[*row.cells(known), *key] for key, row in ordered[:LISTED]]
    if len(ordered) > LISTED:
        rest = _Row()
        for _, row in ordered[LISTED:]:
            rest.add(row)
        cells.append([*rest.cells(known), f"{len(ordered) - LISTED} more", ""])
    told = _table(("count", "client ms", "worker ms", "moving ms", "bytes", "op", "line"), cells)
    if others.count:
        told.append(f"{others.count} calls sent the workers nothing: {_milliseconds(others.client)} ms of the client")
    if runs.left_out:
        told.append(f"worker times are too short: {runs.left_out:,} notes found no room")
    return told


def client_time(issues: Iterable[Issue], calls: Iterable[Call]) -> tuple[list[int], _Row]:
    """For each command the nanoseconds of Python in the call that it comes from, and calls of ops from which none comes.

    What several come from counts up to each for that one, and after the last for the last.
    """
    found: list[int] = []
    latest: dict[int, tuple[int, int]] = {}  # by call: up to when, and for which command
    for issue in issues:
        call = issue.call
        if call is None or not call.stop:  # it had begun before, or goes on
            found.append(0)
            continue
        since, last = latest.get(id(call), (call.start, -1))
        if last >= 0:
            found[last] -= call.stop - since
        found.append(call.stop - since)
        latest[id(call)] = (issue.at, len(found) - 1)
    others = _Row()
    for call in calls:
        if id(call) not in latest and isinstance(call.what, torch._ops.OpOverload):
            others.count += 1
            others.client += call.stop - call.start
    return found, others


def of_communication(communication: Iterable[Communication]) -> list[str]:
    """How often what moved, for which op and line, and the bytes that the busiest device received."""
    counts: Counter[tuple[str, ...]] = Counter()
    nbytes: Counter[tuple[str, ...]] = Counter()
    for one in communication:
        axes = ", ".join(map(str, one.axes)) or "-"
        key = (one.kind, axes, "asked for" if one.asked_for else "inserted", one.op, one.line)
        counts[key] += 1
        nbytes[key] += one.nbytes
    rows = [
        (str(count), key[0], key[1], f"{nbytes[key]:,}", *key[2:])
        for key, count in sorted(counts.items(), key=lambda item: -nbytes[item[0]])
    ]
    return _table(("count", "kind", "axes", "bytes", "", "op", "line"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
    table.insert(1, "  ".join("-" * width for width in widths))
    return table


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.2f}"
