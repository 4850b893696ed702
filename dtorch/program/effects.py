"""What an instruction does to memory: which slots it writes in place, and which its results may be views of."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import torch

from .ir import Communication, Fused, Instruction, Local, Op, Program, Slot, outs_of, slots_of

aten = torch.ops.aten

Writes = Mapping[str, tuple[int, ...]]
"""For device functions, the positions of the arguments that they write. One that is not there and has no results may write them all."""

_STATISTICS = ("running_mean", "running_var")
#: Ops that write inputs without their schema saying so: the names of those inputs, and the flag that switches it on, if there is one.
HIDDEN_WRITES: dict[Any, tuple[tuple[str, ...], str]] = {
    aten.batch_norm.default: (_STATISTICS, "training"),
    aten._batch_norm_impl_index.default: (_STATISTICS, "training"),
    aten.instance_norm.default: (_STATISTICS, "use_input_stats"),
    aten.native_batch_norm.default: (_STATISTICS, "training"),
    aten.cudnn_batch_norm.default: (_STATISTICS, "training"),
    aten.miopen_batch_norm.default: (_STATISTICS, "training"),
    aten.batch_norm_update_stats.default: (_STATISTICS, ""),
}

#: Ops whose results share memory with an input without their schema saying so: the name of that input.
HIDDEN_VIEWS: dict[Any, str] = {
    aten._unsafe_view.default: "self",
    aten.unsafe_split.Tensor: "self",
    aten.unsafe_split_with_sizes.default: "self",
}


def effects(instruction: Instruction, local_writes: Writes) -> tuple[list[int], list[int]]:
    """The slots that ``instruction`` writes, and those that its results may be views of."""
    if isinstance(instruction, (Communication, Fused)):
        return [], []
    if isinstance(instruction, Local):
        used = slots_of(instruction)
        positions = local_writes.get(instruction.name)
        if positions is None:
            return ([] if instruction.outs else used), used
        return [slot for position in positions for slot in _slots(instruction.args[position])], used
    op = op_called(instruction.name)
    if op is None:
        return [], []  # an op that does not exist here writes nothing
    written, viewed = _arguments(op)
    if op in HIDDEN_WRITES:
        names, flag = HIDDEN_WRITES[op]
        if not flag or _given(instruction, *_place(op, flag)) is not False:
            written = tuple(_place(op, name) for name in names)
    return (
        [slot for place in written for slot in _slots(_given(instruction, *place))],
        [slot for place in viewed for slot in _slots(_given(instruction, *place))],
    )


#: The root of all inputs of a program, for two of them may share memory.
OUTSIDE = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What memory a program's values may have. A *root* is `OUTSIDE`, or a slot, for the memory that it may have of its own.

    ``roots``: of each slot; a view has those of what it is a view of, too. ``written``: by each instruction, the roots that it writes.
    """

    roots: dict[int, frozenset[int]]
    written: list[frozenset[int]]


def memory_of(program: Program) -> Memory:
    """The memory of ``program``."""
    outside = frozenset((OUTSIDE,))
    roots = dict.fromkeys(range(program.inputs), outside)
    written = []
    for instruction in program.body:
        writes, viewed = effects(instruction, {})
        behind = frozenset().union(*(roots[slot] for slot in viewed))
        for out in outs_of(instruction):
            if out >= 0:
                roots[out] = behind | {out}
        written.append(frozenset().union(*(roots[slot] for slot in writes)))
    return Memory(roots, written)


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
def op_called(name: str) -> Any:
    """The op that a program calls ``name``; None if there is no such op."""
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


_Place = tuple[int, str]
"""An argument of an op: its position and its name."""


@functools.lru_cache(maxsize=4096)
def _arguments(op: Any) -> tuple[tuple[_Place, ...], tuple[_Place, ...]]:
    """The arguments that an op writes, and those that its results may be views of."""
    schema = op._schema
    places = [(position, argument.name) for position, argument in enumerate(schema.arguments)]
    aliases = [argument.alias_info for argument in schema.arguments]
    written = [place for place, info in zip(places, aliases, strict=True) if info is not None and info.is_write]
    returned = set().union(*(r.alias_info.before_set for r in schema.returns if r.alias_info is not None))
    # A list of views has no name for what it is of; what it is of says "*".
    viewed = [
        place
        for place, info in zip(places, aliases, strict=True)
        if info is not None and (returned & info.before_set or "*" in info.after_set)
    ]
    if op in HIDDEN_VIEWS:
        viewed.append(_place(op, HIDDEN_VIEWS[op]))
    elif op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd) and not any(aliases):
        viewed = (
            places  # made of other ops, of which nobody says what they share: dropout, atleast_1d, broadcast_tensors
        )
    return tuple(written), tuple(viewed)


@functools.lru_cache(maxsize=4096)
def _place(op: Any, name: str) -> _Place:
    names = [argument.name for argument in op._schema.arguments]
    return names.index(name), name


def _given(call: Op, position: int, name: str) -> Any:
    return call.args[position] if position < len(call.args) else call.kwargs.get(name)


def _slots(arg: Any) -> list[int]:
    if isinstance(arg, list):
        return [slot for item in arg for slot in _slots(item)]
    return [arg.index] if isinstance(arg, Slot) else []
