"""What a failed command leaves behind: which values nobody may read any more (docs/architecture.md, law 5)."""

from __future__ import annotations

from typing import Any

import torch

from ..program.ir import Communication, Local, Op, Program, Slot
from .lower import slots_of
from .operators import resolve
from .poison import Poison
from .registry import WRITES


def written_inputs(program: Program, start: int) -> set[int]:
    """The inputs that instructions from ``start`` on write in place, be it through views made in the program."""
    roots: dict[int, set[int]] = {slot: {slot} for slot in range(program.inputs)}
    written: set[int] = set()
    for index, instruction in enumerate(program.body):
        if isinstance(instruction, Communication):
            continue
        writes, viewed = _aliases(instruction)
        if index >= start:
            written.update(*(roots.get(slot, ()) for slot in writes))
        behind = set().union(*(roots.get(slot, ()) for slot in viewed))
        for out in instruction.outs:
            roots[out] = behind
    return written


def _aliases(call: Op | Local) -> tuple[list[int], list[int]]:
    """The slots that ``call`` writes, and those that its results may be views of."""
    if isinstance(call, Local):
        writes = [slot for position in WRITES.get(call.name, ()) for slot in _slots(call.args[position])]
        return writes, slots_of(call)
    try:
        schema = resolve(call.name)._schema
    except ValueError:
        return [], []  # an op that does not exist here wrote nothing
    returned = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    writes, viewed = [], []
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None:
            continue
        given = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
        if info.is_write:
            writes += _slots(given)
        if returned & info.before_set:
            viewed += _slots(given)
    return writes, viewed


def _slots(arg: Any) -> list[int]:
    if isinstance(arg, list):
        return [slot for item in arg for slot in _slots(item)]
    return [arg.index] if isinstance(arg, Slot) else []


def poison_aliases(values: dict[int, torch.Tensor | Poison], written: torch.Tensor, poison: Poison) -> None:
    """Poison every value that shares storage with ``written``."""
    storage = storage_id(written)
    for value, tensor in values.items():
        if isinstance(tensor, torch.Tensor) and storage_id(tensor) == storage:
            values[value] = poison


def storage_id(tensor: torch.Tensor) -> int:
    """What identifies a tensor's storage while the tensor lives."""
    return tensor.untyped_storage()._cdata


def live_bytes(values: dict[int, torch.Tensor | Poison]) -> int:
    """The bytes of the distinct storages that ``values`` keep alive."""
    storages = {}
    for tensor in values.values():
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
