"""When the client and the workers did what: the common ground of `record` and `profile`.

All times are nanoseconds of one clock (`dtorch.worker.tracing.clock`). While nobody looks nothing is slower by it: functions of the
client, and of the workers, are replaced only for as long as somebody does.
"""

from __future__ import annotations

import functools
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from ..client import attention, fresh, in_place, lines, redistribute, runtime, torch_internals
from ..client import controller as _controller
from ..client.controller import Controller
from ..engine import protocol
from ..errors import DTorchError
from ..future import TensorFuture
from ..program.ir import Program
from ..sharding.attention import ASKED_FOR
from ..tensor import Tensor
from ..worker.tracing import FIELDS, clock
from .communication import Communication, communication_of

#: Forward ops whose lines are remembered for their backward.
REMEMBERED = 1 << 16


@dataclass(slots=True, eq=False)
class Call:
    """One call on the client: of an op, of what sends something, or of what waits. ``outer``: the call that it is part of.

    ``what`` is a name or an op. ``where``: the user's line, of a call that is part of no other.
    """

    what: Any
    outer: Call | None
    where: lines.Where | None
    thread: int
    start: int
    stop: int = 0


@dataclass(slots=True, eq=False)
class Issue:
    """One command of the client's, at the moment it was numbered.

    ``command`` is kept only if it runs a program. ``where``: the user's line; for a backward op that of the forward op. ``call``: the
    outermost that it was part of.
    """

    at: int
    sequence: int
    name: str
    command: list | None
    controller: Controller
    where: lines.Where | None
    call: Call | None

    def program(self) -> Program:
        """What it runs, if it runs a program."""
        assert self.command is not None
        return program_called(self.controller, self.command[0])

    def communication(self) -> dict[int, Communication]:
        """What it communicates, by the index of the instruction."""
        if self.command is None:
            return {}
        program = self.program()
        operands = self.command[len(self.command) - program.operands :] + program.constants
        asked_for = self.name == "redistribute" or program.name in ASKED_FOR
        line = lines.text(self.where)
        return communication_of(program, operands, self.controller.meshes.__getitem__, self.name, asked_for, line)


def program_called(controller: Controller, number: int) -> Program:
    """A program that a cluster has been told of."""
    return _decoded(controller.program_bodies[number - protocol.FIRST_PROGRAM][1])


@functools.lru_cache(maxsize=4096)
def _decoded(body: bytes) -> Program:
    return msgspec.msgpack.decode(body, type=Program)


class Run(NamedTuple):
    """What a worker noted: see `dtorch.worker.tracing`."""

    device: int
    start: int
    stop: int
    sequence: int
    kind: int
    instruction: int


@dataclass(slots=True)
class Runs:
    """The workers' notes of what ``controller`` issued; None: it goes on, or the cluster ended before they came.

    ``left_out``: notes that there was no room for.
    """

    controller: Controller | None = None
    notes: list[Run] = field(default_factory=list)
    left_out: int = 0


class Timing:
    """Takes times from `start` to `stop`.

    Args:
        limit: calls, and commands, that are kept; None keeps all.
        parts: keep calls that are part of others, too.
    """

    def __init__(self, limit: int | None = None, parts: bool = False) -> None:
        self.limit = limit
        self.parts = parts
        self.calls: list[Call] = []
        self.issues: list[Issue] = []
        self.left_out = 0
        self.since = clock()
        self._lines: OrderedDict[int, lines.Where | None] = OrderedDict()
        self._controller: Controller | None = None
        self._asked = 0
        self._replies: TensorFuture | None = None
        self._runs: Runs | None = None

    def start(self) -> None:
        """Look on from now. Nothing waits."""
        with _lock:
            if not _active:
                _look_on()
            _active.append(self)
            self.since = clock()
            _ask("start")

    def stop(self) -> None:
        """The end. Nothing waits."""
        with _lock:
            _active.remove(self)
            if not _active:
                _look_away()
            self._asked = clock()
            self._controller = runtime.current()
            self._replies = _ask("read" if _active else "stop")

    def runs(self) -> Runs:
        """What the workers did of what was issued meanwhile, by this process's clock; waits until they have."""
        if self._runs is None:
            if self._replies is None:
                return Runs()
            try:
                replies = self._replies.get()
            except DTorchError:  # the cluster ended
                return Runs()
            self._runs = self._read(replies, clock())
        return self._runs

    def _read(self, replies: dict[int, Any], arrived: int) -> Runs:
        runs = Runs(self._controller)
        for device, reply in sorted(replies.items()):
            ahead = clock_difference(self._asked, reply["now"], arrived)
            runs.left_out += reply["left_out"]
            notes = array("q", reply["notes"])
            for at in range(0, len(notes), FIELDS):
                start, stop, *rest = notes[at : at + FIELDS]
                if start - ahead >= self.since:
                    runs.notes.append(Run(device, start - ahead, stop - ahead, *rest))
        return runs

    def forward_line(self, here: lines.Where | None) -> lines.Where | None:
        """``here``, or the line of the forward op if a backward op is running; remembers the line of a forward op."""
        forward = torch_internals.forward_of_backward()
        if forward is not None:
            return self._lines.get(forward, here)
        self._lines[torch_internals.last_autograd_node()] = here
        if len(self._lines) > REMEMBERED:
            self._lines.popitem(last=False)
        return here

    def _called(self, call: Call) -> None:
        if call.outer is not None and not self.parts:
            return
        if self.limit is None or len(self.calls) < self.limit:
            self.calls.append(call)
        else:
            self.left_out += 1

    def _issued(self, controller: Controller, command: list, name: str, sequence: int) -> None:
        """Take one command; the caller holds the controller's lock."""
        if self.limit is not None and len(self.issues) >= self.limit:
            self.left_out += 1
            return
        call = _thread.open[0] if _thread.open else None
        kept = command if command[0] >= protocol.FIRST_PROGRAM else None
        where = self.forward_line(None if call is None else call.where)
        self.issues.append(Issue(clock(), sequence, name, kept, controller, where, call))


def clock_difference(asked: int, theirs: int, arrived: int) -> int:
    """By how much a worker's clock is ahead: not at all if it read, between question and answer, what ours could have.

    That is so on one machine. Elsewhere a boot ago is another time, and the answer is taken to have been half way.
    """
    return 0 if asked <= theirs <= arrived else theirs - (asked + arrived) // 2


class _Thread(threading.local):
    """The calls that are running in this thread, the outermost first."""

    def __init__(self) -> None:
        self.open: list[Call] = []


_thread = _Thread()
_lock = threading.RLock()
_active: list[Timing] = []


def _issue_name(controller: Controller, command: list, name: str | None = None, depth: int = 0) -> str:
    return f"issue {name or COMMANDS.get(command[0], 'program')}"


#: What people call the commands that run no program.
COMMANDS = {
    getattr(protocol, name): name.lower()
    for name in ("DEFINE", "MESH", "PUT", "GET", "DESCRIBE", "SYNC", "STATS", "IMPORT", "THREADS", "SHARDS")
} | {protocol.DEFAULT_DTYPE: "default dtype", protocol.TRACE: "trace", protocol.FREE: "free"}


def timed_functions() -> tuple[tuple[Any, str, Any], ...]:
    """What is timed on the client, as attributes, and what to call it: a name, or a function of the arguments.

    None of it runs the user's code, whose lines are told by what is called.
    """
    from ..capture.captured import Captured  # imported when first needed, as everywhere

    return (
        (Tensor, "__torch_dispatch__", lambda cls, op, *_: op),
        (Controller, "issue", _issue_name),
        (Controller, "flush", "send"),
        (Controller, "put", "put"),
        (Controller, "get", "read"),
        (TensorFuture, "wait", "wait"),
        (Captured, "run", lambda captured, *_: captured.name),
        (attention, "_run", "scaled_dot_product_attention"),
        (fresh, "make", lambda builder, name, *_: name),
        (in_place, "run", lambda name, *_: name),
        (redistribute, "move", lambda x, goal, why="redistribute": why),
    )


_originals: list[tuple[Any, str, Any]] = []


def _look_on() -> None:
    for owner, attribute, name in timed_functions():
        original = vars(owner)[attribute]
        _originals.append((owner, attribute, original))
        if isinstance(original, classmethod):
            setattr(owner, attribute, classmethod(_timed(original.__func__, name)))
        else:
            setattr(owner, attribute, _timed(original, name))
    _controller.observers.append(_tell)
    _controller.traced = True


def _look_away() -> None:
    _controller.traced = False
    _controller.observers.remove(_tell)
    while _originals:
        setattr(*_originals.pop())


def _tell(controller: Controller, command: list, name: str, sequence: int) -> None:
    for timing in _active:
        timing._issued(controller, command, name, sequence)


def _timed(function: Callable[..., Any], name: Any) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        running = _thread.open
        depth = len(running)
        outer = running[-1] if running else None
        what = name if isinstance(name, str) else name(*args, **kwargs)
        where = None if running else lines.caller()
        call = Call(what, outer, where, threading.get_ident(), clock())
        try:
            running.append(call)
            return function(*args, **kwargs)
        finally:
            call.stop = clock()
            del running[depth:]
            for timing in _active:
                timing._called(call)

    return timed


def _ask(what: str) -> TensorFuture | None:
    """The workers' replies to a TRACE command; None where there are no workers."""
    controller = runtime.current()
    if controller is None or not controller.devices:
        return None
    try:
        return controller.ask_all_async(TensorFuture(), protocol.TRACE, what)
    except DTorchError:  # the cluster has lost a worker: whoever uses it is told
        return None
