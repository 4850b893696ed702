"""What an instruction does to memory: which slots it writes in place, and which its results may be views of."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from .ir import Communication, Instruction, Local, Program, Slot, outs_of, slots_of

Writes = Mapping[str, tuple[int, ...]]
"""For device functions, the positions of the arguments that they write. One that is not there and has no results may write them all."""


def effects(instruction: Instruction, local_writes: Writes) -> tuple[list[int], list[int]]:
    """The slots that ``instruction`` writes, and those that its results may be views of."""
    if isinstance(instruction, Communication):
        return [], []
    if isinstance(instruction, Local):
        used = slots_of(instruction)
        positions = local_writes.get(instruction.name)
        if positions is None:
            return ([] if instruction.outs else used), used
        return [slot for position in positions for slot in _slots(instruction.args[position])], used
    schema = schema_of(instruction.name)
    if schema is None:
        return [], []  # an op that does not exist here writes nothing
    returned = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    writes, viewed = [], []
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        given = (
            instruction.args[position] if position < len(instruction.args) else instruction.kwargs.get(argument.name)
        )
        if info.is_write:
            writes += _slots(given)
        if returned & info.before_set:
            viewed += _slots(given)
    return writes, viewed


def written_inputs(program: Program, start: int = 0, local_writes: Writes = {}) -> set[int]:  # noqa: B006 - read only
    """The inputs that instructions from ``start`` on write in place, be it through views made in the program."""
    roots = {slot: {slot} for slot in range(program.inputs)}
    written: set[int] = set()
    for index, instruction in enumerate(program.body):
        writes, viewed = effects(instruction, local_writes)
        if index >= start:
            written.update(*(roots.get(slot, ()) for slot in writes))
        behind = set().union(*(roots.get(slot, ()) for slot in viewed))
        for out in outs_of(instruction):
            roots[out] = behind
    return written


@functools.lru_cache(maxsize=4096)
def schema_of(name: str) -> Any:
    """The schema of the op that a program calls ``name``; None if there is no such op."""
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
        return found._schema
    except AttributeError:
        return None


def _slots(arg: Any) -> list[int]:
    if isinstance(arg, list):
        return [slot for item in arg for slot in _slots(item)]
    return [arg.index] if isinstance(arg, Slot) else []
