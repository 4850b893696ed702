"""One program of many: the commands that a function issued become what a later call of it issues instead.

Values named by number in commands become slots. Ops of one program run on one mesh, so commands on different meshes become a
few programs in a row; a function on one mesh, whatever it moves to others, is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from .ir import Instruction, Operand, Program, outs_of, slots_of
from .rewrite import Pass, renamed


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


def compose(name: str, commands: Sequence[Command], kept: Collection[int], passes: Sequence[Pass]) -> list[Segment]:
    """The programs that do what ``commands`` do and leave the values ``kept``, each gone through ``passes``, one after the other."""
    groups: list[list[Command]] = []
    for command in commands:
        if groups and groups[-1][-1].program.mesh == command.program.mesh:
            groups[-1].append(command)
        else:
            groups.append([command])
    segments: list[Segment] = []
    wanted = set(kept)
    for group in reversed(groups):
        segment = _Composer(name, group, wanted).segment(passes)
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

    def segment(self, passes: Sequence[Pass]) -> Segment:
        varying = dict.fromkeys(number for command in self.commands for number in command.varying.values())
        self.numbers = list(varying)
        for command in self.commands:
            self.inline(command)
        program = Program(
            self.name,
            self.commands[0].program.mesh,
            len(self.inputs),
            len(self.numbers),
            self.body,
            [self.slots[value] for value in self.outputs],
            self.constants,
        )
        origins = self.origins
        for rewritten in passes:
            program, sources = rewritten(program)
            origins = [origins[source] for source in sources]
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

    def constant(self, value: Any) -> Operand:
        """A constant of the program; equal ones are kept once."""
        key = repr(value)
        index = self.known.get(key)
        if index is None:
            index = self.known[key] = len(self.constants)
            self.constants.append(value)
        return Operand(len(self.numbers) + index)


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
