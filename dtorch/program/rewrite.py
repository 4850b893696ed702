"""What passes have in common: each is a pure function from a `Program` to a `Rewritten`, which does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .ir import Fused, Instruction, Layout, LocalShape, Operand, Program, Slot, outs_of, slots_of


class Rewritten(NamedTuple):
    """A program, and for each of its instructions the index of the one that it comes from."""

    program: Program
    sources: list[int]


Pass = Callable[[Program], Rewritten]


class Rewriter:
    """Writes a program that replaces another: the same inputs, outputs and operands, new instructions, slots and constants."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._slots = 1 + max(_slots(program), default=-1)
        self._constants = list(program.constants)
        self._known = {repr(value): index for index, value in enumerate(self._constants)}
        self._body: list[Instruction] = []
        self._sources: list[int] = []

    def emit(self, instruction: Instruction, source: int) -> None:
        """The next instruction, which comes from instruction ``source`` of the program."""
        self._body.append(instruction)
        self._sources.append(source)

    def slot(self) -> int:
        """A new slot."""
        self._slots += 1
        return self._slots - 1

    def constant(self, value: Any) -> Operand:
        """A constant of the program; equal ones are kept once."""
        index = self._known.get(repr(value))
        if index is None:
            index = self._known[repr(value)] = len(self._constants)
            self._constants.append(value)
        return Operand(self._program.operands + index)

    def done(self, outputs: list[int] | None = None) -> Rewritten:
        """What was written; ``outputs``: its output slots, where they are others."""
        old = self._program
        chosen = old.outputs if outputs is None else outputs
        program = Program(old.name, old.mesh, old.inputs, old.operands, self._body, chosen, self._constants)
        return Rewritten(program, self._sources)


def renamed(instruction: Instruction, slot: Any, operand: Any) -> Instruction:
    """``instruction`` with other slots and operands: ``slot(index)`` is the new index, ``operand(index)`` the new `Operand`."""

    def convert(value: Any) -> Any:
        if isinstance(value, Slot):
            return Slot(slot(value.index))
        if isinstance(value, Operand):
            return operand(value.index)
        if isinstance(value, LocalShape):
            return LocalShape(operand(value.shape.index), value.placements)
        if isinstance(value, Layout):
            return Layout(value.placements, operand(value.shape.index))
        if isinstance(value, list):
            return [convert(item) for item in value]
        if isinstance(value, dict):
            return {name: convert(item) for name, item in value.items()}
        return value

    changed = {}
    for field in instruction.__struct_fields__:
        value = getattr(instruction, field)
        if field in ("source", "out"):
            changed[field] = slot(value)
        elif isinstance(instruction, Fused) and field != "outs":
            changed[field] = {
                "inputs": lambda: [slot(index) for index in instruction.inputs],
                "body": lambda: [renamed(op, lambda index: index, operand) for op in instruction.body],
                "results": lambda: instruction.results,
            }[field]()
        elif field == "move":
            changed[field] = renamed(value, slot, operand)
        elif field == "outs":
            changed[field] = [out if out < 0 else slot(out) for out in value]
        elif isinstance(value, (Operand, list, dict)) and field not in ("orders", "order"):
            changed[field] = convert(value)
        else:
            changed[field] = value
    return type(instruction)(**changed)


def _slots(program: Program) -> list[int]:
    used = [slot for instruction in program.body for slot in (*slots_of(instruction), *outs_of(instruction))]
    return [program.inputs - 1, *used]
