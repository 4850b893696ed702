"""One program of many: the commands that a function issued become what a later call of it issues instead.

Values named by number in commands become slots. Ops of one program run on one mesh, so commands on different meshes become a
few programs in a row; a function on one mesh, whatever it moves to others, is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from .buckets import Buckets
from .effects import effects
from .ir import Instruction, Layout, LocalShape, Operand, Program, ShiftDone, ShiftStart, Slot, outs_of, slots_of


@dataclasses.dataclass(slots=True)
class Command:
    """One run of a program: values by number, operands, and the user's line that asked for it.

    ``varying``: for some operands, by position, which number of the whole call it is.
    """

    program: Program
    inputs: list[int]
    outputs: list[int]
    operands: list[Any]
    name: str = ""
    line: Any = None
    varying: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Segment:
    """A composed program, the values that a run of it names, and the numbers of the call that it takes.

    ``origins``: of each instruction, the command that it comes from.
    """

    program: Program
    inputs: list[int]
    outputs: list[int]
    numbers: list[int]
    origins: list[Command]


def compose(name: str, commands: Sequence[Command], kept: Collection[int]) -> list[Segment]:
    """The programs that do what ``commands`` do and leave the values ``kept``."""
    groups: list[list[Command]] = []
    for command in commands:
        if groups and groups[-1][-1].program.mesh == command.program.mesh:
            groups[-1].append(command)
        else:
            groups.append([command])
    segments: list[Segment] = []
    wanted = set(kept)
    for group in reversed(groups):
        segment = _Composer(name, group, wanted).segment()
        if segment.program.body:
            segments.append(segment)
            wanted.update(segment.inputs)
    return segments[::-1]


class _Composer:
    """Writes one segment."""

    def __init__(self, name: str, commands: list[Command], wanted: Collection[int]) -> None:
        self.name = name
        self.commands = commands
        made = {value for command in commands for value in command.outputs}
        self.outputs = [v for command in commands for v in command.outputs if v in wanted]
        self.inputs = list(dict.fromkeys(v for c in commands for v in c.inputs if v not in made))
        self.slots: dict[int, int] = {value: slot for slot, value in enumerate(self.inputs)}
        self.count = len(self.inputs)
        self.numbers: list[int] = []
        self.constants: list[Any] = []
        self.known: dict[str, int] = {}
        self.body: list[Instruction] = []
        self.origins: list[Command] = []

    def segment(self) -> Segment:
        varying = dict.fromkeys(number for command in self.commands for number in command.varying.values())
        self.numbers = list(varying)
        for command in self.commands:
            self.inline(command)
        outputs = [self.slots[value] for value in self.outputs]
        body, origins = _needed(self.body, self.origins, len(self.inputs), outputs)
        body, origins = Buckets(self.count, self.constant, self.value).arrange(body, origins)
        program = Program(
            self.name,
            self.commands[0].program.mesh,
            len(self.inputs),
            len(self.numbers),
            body,
            outputs,
            self.constants,
        )
        return Segment(*_without_unused_inputs(program, self.inputs), self.outputs, self.numbers, origins)

    def inline(self, command: Command) -> None:
        program = command.program
        slots = {slot: self.slots[value] for slot, value in enumerate(command.inputs)}
        for instruction in program.body:
            for out in outs_of(instruction):
                if out >= 0:
                    slots[out] = self.count
                    self.count += 1
        operands: dict[int, Operand] = {}

        def operand(index: int) -> Operand:
            found = operands.get(index)
            if found is None:
                if index in command.varying:
                    found = Operand(self.numbers.index(command.varying[index]))
                elif index >= program.operands:
                    found = self.constant(program.constants[index - program.operands])
                else:
                    found = self.constant(command.operands[index])
                operands[index] = found
            return found

        for instruction in program.body:
            self.body.append(renamed(instruction, slots.__getitem__, operand))
            self.origins.append(command)
        for value, slot in zip(command.outputs, program.outputs, strict=True):
            self.slots[value] = slots[slot]

    def value(self, operand: Operand) -> Any:
        """What an operand is in every run; None if each run says."""
        index = operand.index - len(self.numbers)
        return None if index < 0 else self.constants[index]

    def constant(self, value: Any) -> Operand:
        """A constant of the program; equal ones are kept once."""
        key = repr(value)
        index = self.known.get(key)
        if index is None:
            index = self.known[key] = len(self.constants)
            self.constants.append(value)
        return Operand(len(self.numbers) + index)


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
        elif field == "outs":
            changed[field] = [out if out < 0 else slot(out) for out in value]
        elif isinstance(value, (Operand, list, dict)) and field not in ("orders", "order"):
            changed[field] = convert(value)
        else:
            changed[field] = value
    return type(instruction)(**changed)


def _needed(
    body: list[Instruction], origins: list[Command], inputs: int, outputs: Iterable[int]
) -> tuple[list[Instruction], list[Command]]:
    """``body`` without what makes only values that nobody wants. What writes memory stays, unless it wrote only such values."""
    roots: dict[int, frozenset[int]] = {slot: frozenset((slot,)) for slot in range(inputs)}
    touched = []
    for instruction in body:
        writes, viewed = effects(instruction, {})
        behind = frozenset().union(*(roots[slot] for slot in viewed))
        for out in outs_of(instruction):
            if out >= 0:
                roots[out] = behind | {out}
        touched.append(frozenset().union(*(roots[slot] for slot in writes)))
    wanted = set(range(inputs)).union(*(roots[slot] for slot in outputs))
    keep = [False] * len(body)
    for index in range(len(body) - 1, -1, -1):
        instruction, written = body[index], touched[index]
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
                wanted |= roots[slot]
    return [i for i, kept in zip(body, keep, strict=True) if kept], [
        o for o, kept in zip(origins, keep, strict=True) if kept
    ]


def _without_unused_inputs(program: Program, values: list[int]) -> tuple[Program, list[int]]:
    used = {slot for instruction in program.body for slot in slots_of(instruction)} | set(program.outputs)
    kept = [slot for slot in range(program.inputs) if slot in used]
    if len(kept) == program.inputs:
        return program, values
    place = {slot: index for index, slot in enumerate(kept)}
    shift = program.inputs - len(kept)
    body = [renamed(i, lambda slot: place.get(slot, slot - shift), Operand) for i in program.body]
    outputs = [place.get(slot, slot - shift) for slot in program.outputs]
    renumbered = Program(program.name, program.mesh, len(kept), program.operands, body, outputs, program.constants)
    return renumbered, [values[slot] for slot in kept]
