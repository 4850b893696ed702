"""`record`: which ops ran, how long they took, what they communicated, and the user's line for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..client import lines
from ..mesh import DeviceMesh
from ..placement import PlacementList
from . import tables
from .communication import Communication
from .timing import Issue, Timing


@dataclass(frozen=True, slots=True)
class OpRun:
    """One op that the workers were asked to run, with the user's line, and the meshes whose workers run it: that of the op first."""

    name: str
    line: str
    meshes: tuple[DeviceMesh, ...]


@dataclass(frozen=True, slots=True)
class Fallback:
    """One op whose inputs were gathered, because no rule allows it on pieces.

    ``inputs``: the global shape and the placements of each tensor; ``line``: the user's.
    """

    name: str
    inputs: tuple[tuple[tuple[int, ...], PlacementList], ...]
    line: str


class Recording:
    """What `record` has seen so far. ``ops``, ``communication`` and ``fallbacks`` are lists, in the order of issue."""

    def __init__(self) -> None:
        self.fallbacks: list[Fallback] = []
        self._timing = Timing()
        self._read = 0
        self._issues: list[Issue] = []
        self._nbytes: list[int] = []
        self._ops: list[OpRun] = []
        self._communication: list[Communication] = []

    @property
    def ops(self) -> list[OpRun]:
        self._catch_up()
        return self._ops

    @property
    def communication(self) -> list[Communication]:
        self._catch_up()
        return self._communication

    def _catch_up(self) -> None:
        """Work out what was issued since the last time: while recording there is better to do."""
        while self._read < len(self._timing.issues):
            issue = self._timing.issues[self._read]
            self._read += 1
            if issue.command is not None:
                program = issue.program()
                meshes = [program.mesh, *sorted(program.meshes() - {program.mesh})]
                self._issues.append(issue)
                self._ops.append(
                    OpRun(issue.name, lines.text(issue.where), tuple([issue.controller.meshes[m] for m in meshes]))
                )
                moved = issue.communication().values()
                self._nbytes.append(sum(one.nbytes for one in moved))
                self._communication += moved

    def _gathered(self, name: str, specs: Any) -> None:
        """The op that is issued next is run gathered."""
        line = lines.text(self._timing.forward_line(lines.caller()))
        self.fallbacks.append(Fallback(name, tuple((tuple(s.shape), s.placements) for s in specs), line))

    def summary(self) -> str:
        """Two tables: of the ops, with their times, and of the communication, each by the user's line. Waits until it all has run.

        Times are milliseconds. Of the client: of Python, in the calls that the ops came from. Of a worker: the one that took longest for
        the row, and how much of that went by moving data and waiting for others. Recording itself makes the client take some 1.6 times as
        long an op; in simulation the workers run within the client's time.
        """
        self._catch_up()
        total = sum(one.nbytes for one in self.communication)
        inserted = sum(not one.asked_for for one in self.communication)
        told = [
            *tables.of_ops(self._issues, self._nbytes, self._timing.calls, self._timing.runs()),
            "",
            *tables.of_communication(self.communication),
            f"{len(self.ops)} ops; {len(self.communication)} redistributions ({inserted} inserted), {total:,} bytes to the busiest "
            f"device; {len(self.fallbacks)} ops gathered for lack of a rule",
        ]
        told += [
            f"  {name}: {count} times" for name, count in Counter(one.name for one in self.fallbacks).most_common()
        ]
        return "\n".join(told)

    def __repr__(self) -> str:
        return f"<Recording of {len(self.ops)} ops, {len(self.communication)} with communication, {len(self.fallbacks)} gathered>"


#: Those that look on now.
ACTIVE: list[Recording] = []


@contextmanager
def record() -> Iterator[Recording]:
    """Note every op that is issued within, and all that it communicates. Nothing waits; recordings may nest.

    Gives a `Recording` with the lists ``ops``, ``communication`` (see `Communication`: kind, bytes, mesh axes, shape, asked for or
    inserted, the user's line) and ``fallbacks``, and ``summary()``, a table.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> x = dtorch.ones(4, 6, device_mesh=mesh, placements=[Shard(1)])
        >>> with record() as r:
        ...     y = x.softmax(1)
        >>> [(c.kind, c.axes, c.nbytes, c.asked_for) for c in r.communication]
        [('all_gather', ('tp',), 48, False)]
    """
    recording = Recording()
    ACTIVE.append(recording)
    recording._timing.start()
    try:
        yield recording
    finally:
        recording._timing.stop()
        ACTIVE.remove(recording)
