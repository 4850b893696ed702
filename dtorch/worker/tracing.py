"""When a device ran what: noted while a profile or a recording wants to know, as numbers in an array.

Nothing else pays for it: `Tracer.run` takes the place of `Executor.run` for as long. It drives what communicates, too, so it sees
every wait for others without the engine's help.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator
from types import GeneratorType
from typing import Any

from ..engine import protocol
from .lower import FILENAME, Code

#: Notes that a device keeps; what comes after is counted.
LIMIT = 1 << 18

#: Numbers in a note: start and stop (`clock`), the command's sequence number, its first item, and an instruction's index or one of:
FIELDS = 5
#: the whole command;
WHOLE = -1
#: a transfer that is only made so that others do not wait for ever, after a failure.
AFTER_FAILURE = -2

#: Nanoseconds of CLOCK_MONOTONIC, which is one clock for all processes of a machine.
clock = time.monotonic_ns


class Tracer:
    """Notes when one device runs what.

    Args:
        run: `Executor.run`.
        code_of: the code of a program that communicates and is running.
    """

    def __init__(self, run: Callable[[list, int], Any], code_of: Callable[[int], Code | None]) -> None:
        self._run = run
        self._code_of = code_of
        self._notes = array("q")
        self._left_out = 0

    def report(self) -> dict[str, Any]:
        """``notes``: `FIELDS` 64-bit integers each; ``left_out``: how many there was no room for; ``now``: this device's clock."""
        return {"notes": self._notes.tobytes(), "left_out": self._left_out, "now": clock()}

    def run(self, command: list, sequence: int) -> Generator[Any, Any, None] | None:
        """See `Executor.run`."""
        kind = command[0]
        if kind == protocol.FREE:
            return self._run(command, sequence)
        start = clock()
        steps = self._run(command, sequence)
        if steps is not None:
            return self._driven(steps, start, sequence, kind)
        self._note(start, sequence, kind, WHOLE)
        return None

    def _driven(self, steps: GeneratorType, start: int, sequence: int, kind: int) -> Generator[Any, Any, None]:
        """``steps``, with a note for each transfer that it asks for, and one for it all."""
        try:
            request = next(steps)
            while True:
                index = self._instruction(steps, kind)
                asked = clock()
                try:
                    result = yield request
                except Exception as error:
                    self._note(asked, sequence, kind, index)
                    request = steps.throw(error)
                else:
                    self._note(asked, sequence, kind, index)
                    request = steps.send(result)
        except StopIteration:
            self._note(start, sequence, kind, WHOLE)

    def _instruction(self, steps: GeneratorType, kind: int) -> int:
        """The index of the instruction at which a program's run is suspended."""
        innermost = steps
        while isinstance(innermost.gi_yieldfrom, GeneratorType):
            innermost = innermost.gi_yieldfrom
        code = self._code_of(kind)
        if code is None or innermost.gi_code.co_filename != FILENAME:
            return AFTER_FAILURE
        return code.lines[innermost.gi_frame.f_lineno]

    def _note(self, start: int, sequence: int, kind: int, index: int) -> None:
        if len(self._notes) < LIMIT * FIELDS:
            self._notes.extend((start, clock(), sequence, kind, index))
        else:
            self._left_out += 1
