"""`record`: which ops ran, what they communicated, and the user's line for each."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from ..client import controller as _controller
from ..client import lines, torch_internals
from ..engine import protocol
from ..mesh import DeviceMesh
from ..placement import PlacementList
from ..program.ir import Program
from ..sharding.attention import ASKED_FOR
from .communication import Communication, communication_of

#: Forward ops whose lines are remembered for their backward.
REMEMBERED = 1 << 16


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
        self.ops: list[OpRun] = []
        self.communication: list[Communication] = []
        self.fallbacks: list[Fallback] = []
        self._programs: dict[bytes, Program] = {}  # by their definitions: another cluster numbers them anew
        self._lines: OrderedDict[int, str] = OrderedDict()

    def _issued(self, controller: Any, command: list, name: str, sequence: int) -> None:
        """Take one command; the caller holds the controller's lock."""
        number = command[0]
        if number < protocol.FIRST_PROGRAM:
            return
        line = self._line(controller.history.line(sequence))
        body = controller.program_bodies[number - protocol.FIRST_PROGRAM][1]
        program = self._programs.get(body)
        if program is None:
            program = self._programs[body] = msgspec.msgpack.decode(body, type=Program)
        meshes = [program.mesh, *sorted(program.meshes() - {program.mesh})]
        self.ops.append(OpRun(name, line, tuple([controller.meshes[mesh] for mesh in meshes])))
        operands = command[len(command) - program.operands :]
        asked_for = name == "redistribute" or program.name in ASKED_FOR
        self.communication += communication_of(program, operands, controller.meshes.__getitem__, name, asked_for, line)

    def _gathered(self, name: str, specs: Any) -> None:
        """The op that is issued next is run gathered."""
        line = self._line(lines.here())
        self.fallbacks.append(Fallback(name, tuple((tuple(s.shape), s.placements) for s in specs), line))

    def _line(self, here: str) -> str:
        """``here``, or the line of the forward op if a backward op is running; remembers the line of a forward op."""
        forward = torch_internals.forward_of_backward()
        if forward is not None:
            return self._lines.get(forward, here)
        self._lines[torch_internals.last_autograd_node()] = here
        if len(self._lines) > REMEMBERED:
            self._lines.popitem(last=False)
        return here

    def summary(self) -> str:
        """A table of the communication: how often, what, for which op and line, and the bytes that the busiest device received."""
        head = ("count", "kind", "axes", "bytes", "", "op", "line")
        counts: Counter[tuple[str, ...]] = Counter()
        nbytes: Counter[tuple[str, ...]] = Counter()
        for one in self.communication:
            axes = ", ".join(map(str, one.axes)) or "-"
            key = (one.kind, axes, "asked for" if one.asked_for else "inserted", one.op, one.line)
            counts[key] += 1
            nbytes[key] += one.nbytes
        rows = [
            (str(count), key[0], key[1], f"{nbytes[key]:,}", *key[2:])
            for key, count in sorted(counts.items(), key=lambda item: -nbytes[item[0]])
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (head, *rows)]
        table.insert(1, "  ".join("-" * width for width in widths))
        total = sum(one.nbytes for one in self.communication)
        inserted = sum(not one.asked_for for one in self.communication)
        table.append(
            f"{len(self.ops)} ops; {len(self.communication)} redistributions ({inserted} inserted), {total:,} bytes to the busiest "
            f"device; {len(self.fallbacks)} ops gathered for lack of a rule"
        )
        table += [
            f"  {name}: {count} times" for name, count in Counter(one.name for one in self.fallbacks).most_common()
        ]
        return "\n".join(table)

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
    _controller.observers.append(recording._issued)
    try:
        yield recording
    finally:
        ACTIVE.remove(recording)
        _controller.observers.remove(recording._issued)
