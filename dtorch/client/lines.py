"""Which line of the user's code issued an instruction: a bounded table, cheap to write and read only when something fails."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType
from typing import Any

import torch

#: Instructions that are remembered.
REMEMBERED = 1 << 16
#: Frames kept of each; torch's own modules put up to eight between a user's line and dispatch.
DEPTH = 10

_INTERNAL = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)


class History:
    """Sequence number → (op, frames). Frames are kept as (code, instruction) pairs, never as frames, which would keep locals alive."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Any] = [None] * REMEMBERED

    def note(self, sequence: int, name: str) -> None:
        """Remember who called, two frames up."""
        frames: list[Any] = []
        frame: Any = sys._getframe(2)
        depth = DEPTH
        while frame is not None and depth:
            frames.append(frame.f_code)
            frames.append(frame.f_lasti)
            frame = frame.f_back
            depth -= 1
        self.entries[sequence % REMEMBERED] = (sequence, name, frames)

    def describe(self, sequence: int) -> str:
        """Lines for an error message: the op, and where the user called it."""
        entry = self.entries[sequence % REMEMBERED]
        if entry is None or entry[0] != sequence:
            return "  (issued too long ago to know the line)"
        _, name, frames = entry
        line = user_line(frames)
        return f"  in {name}" + ("" if line is None else f", issued at {line}")


def user_line(frames: list[Any]) -> str | None:
    """``file:line: text`` of the innermost frame outside torch and dtorch."""
    for code, instruction in zip(frames[::2], frames[1::2], strict=True):
        if not code.co_filename.startswith(_INTERNAL):
            number = line_number(code, instruction)
            text = linecache.getline(code.co_filename, number).strip()
            return f"{code.co_filename}:{number}" + (f": {text}" if text else "")
    return None


def line_number(code: CodeType, instruction: int) -> int:
    """The source line of a bytecode offset."""
    found = code.co_firstlineno
    for start, stop, line in code.co_lines():
        if start <= instruction < stop and line is not None:
            return line
    return found
