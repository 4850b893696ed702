"""Which line of the user's code issued an instruction: a bounded table, cheap to write and read only when something fails."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from types import CodeType
from typing import Any, TypeVar

import torch

Error = TypeVar("Error", bound=Exception)

Where = tuple[CodeType, int]
"""A code and an instruction in it: a line, looked up when it is wanted."""

#: Instructions that are remembered.
REMEMBERED = 1 << 16
#: Characters of a source line that a message quotes at most.
QUOTED = 120

_INTERNAL = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)


class _Files(dict[str, bool]):
    """Whether a file of code is the user's: not torch's, nor ours."""

    def __missing__(self, name: str) -> bool:
        found = self[name] = not name.startswith(_INTERNAL)
        return found


#: A code's hash is that of all its names and constants; its file's name knows its own.
_is_users = _Files()


class History:
    """Sequence number → (op, code, instruction) of the innermost frame outside torch and dtorch; never frames, which keep locals alive."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Any] = [None] * REMEMBERED

    def note(self, sequence: int, name: str, depth: int) -> None:
        """Remember who called: the first user's frame from ``depth`` frames up."""
        frame: Any = sys._getframe(depth)
        while frame is not None:
            code = frame.f_code
            if _is_users[code.co_filename]:
                self.entries[sequence % REMEMBERED] = (sequence, name, code, frame.f_lasti)
                return
            frame = frame.f_back
        self.entries[sequence % REMEMBERED] = (sequence, name, None, 0)

    def describe(self, sequence: int) -> str:
        """Lines for an error message: the op, and where the user called it."""
        entry = self.entries[sequence % REMEMBERED]
        if entry is None or entry[0] != sequence:
            return "  (issued too long ago to know the line)"
        line = self.line(sequence)
        return f"  in {entry[1]}" + (f", issued at {line}" if line else "")

    def where(self, sequence: int) -> Where | None:
        """The line that issued a command just now."""
        _, _, code, instruction = self.entries[sequence % REMEMBERED]
        return None if code is None else (code, instruction)

    def line(self, sequence: int) -> str:
        """``file:line: text`` of who issued a command lately; empty if no user's code did."""
        return text(self.where(sequence))


def caller() -> Where | None:
    """The innermost frame outside torch and dtorch that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_users[code.co_filename]:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def here() -> str:
    """``file:line: text`` of the innermost frame outside torch and dtorch that is running; empty if there is none."""
    return text(caller())


def with_line(error: Error) -> Error:
    """The error with the user's line in its message, where planning, which is pure, does not know it, and a traceback may bury it."""
    return type(error)(f"{error}\n  at {here()}")


def warn(message: str) -> None:
    """A warning that points at the user's line, as `here` does; at whoever warns if no user's code runs."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame is not None and not _is_users[frame.f_code.co_filename]:
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=2 if frame is None else level)


def text(where: Where | None) -> str:
    """``file:line: text``; empty for nowhere."""
    if where is None:
        return ""
    code, instruction = where
    number = line_number(code, instruction)
    source = linecache.getline(code.co_filename, number).strip()
    if len(source) > QUOTED:
        source = source[: QUOTED - 1] + "…"
    return f"{code.co_filename}:{number}" + (f": {source}" if source else "")


def shortened(message: Any) -> str:
    """A message as a log may show it: without the bytes of tensors."""
    if isinstance(message, (bytes, bytearray, memoryview)):
        return f"<{len(message)} bytes>"
    if isinstance(message, list):
        return "[" + ", ".join([shortened(item) for item in message]) + "]"
    return "<tensor>" if isinstance(message, torch.Tensor) else repr(message)


def line_number(code: CodeType, instruction: int) -> int:
    """The source line of a bytecode offset."""
    found = code.co_firstlineno
    for start, stop, line in code.co_lines():
        if start <= instruction < stop and line is not None:
            return line
    return found
