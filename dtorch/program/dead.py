"""Dead work: what makes only values that nobody wants is dropped. What writes memory stays, unless it wrote only such values."""

from __future__ import annotations

from .effects import OUTSIDE, memory_of
from .ir import Program, ShiftDone, ShiftStart, outs_of, slots_of
from .rewrite import Rewriter, Rewritten


def drop_dead(program: Program) -> Rewritten:
    """``program`` without dead work."""
    memory = memory_of(program)
    wanted = {OUTSIDE}.union(*(memory.roots[slot] for slot in program.outputs))
    keep = [False] * len(program.body)
    for index in range(len(program.body) - 1, -1, -1):
        instruction, written = program.body[index], memory.written[index]
        outs = [out for out in outs_of(instruction) if out >= 0]
        if isinstance(instruction, (ShiftStart, ShiftDone)):
            needed = True  # a hop's two ends stay together
        elif written:
            needed = bool(written & wanted)
        else:
            needed = not outs
        if needed or any(out in wanted for out in outs):
            keep[index] = True
            for slot in slots_of(instruction):
                wanted |= memory.roots[slot]
    rewriter = Rewriter(program)
    for index, instruction in enumerate(program.body):
        if keep[index]:
            rewriter.emit(instruction, index)
    return rewriter.done()
