"""Reduce-scatter in place of all-reduce, where what follows an all-reduce need not be computed on every device.

Between an all-reduce and what needs its whole result often stand ops on each element alone. They may as well run on shards: the sum is
reduced into shards, and what leaves these ops is gathered, if it is needed whole (as sequence parallelism does around norms and
dropout, Korthikanti et al., MLSys 2023), or else is there already, for who wanted a shard. An all-reduce is a reduce-scatter and an
all-gather, so this sends no more, but in more pieces; it is done where computing and sending less outweighs that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from ..mesh import DeviceMesh
from ..placement import decode
from ..raw import dtype_called, dtype_name
from ..sharding.problem import LATENCY
from ..sharding.transfer import steps
from .effects import memory_of, op_called
from .ir import Const, Instruction, LocalShape, Op, Operand, Program, Reshard, Slot, outs_of, slots_of
from .rewrite import Rewriter, Rewritten, renamed

_WHOLE = -1


def scatter(program: Program, mesh_of: Callable[[int], DeviceMesh], latency: int = LATENCY) -> Rewritten:
    """``program`` with shards where they are as good as what is whole.

    Args:
        mesh_of: the mesh of a number.
        latency: what one more collective costs, in bytes.
    """
    regions = [region for region in _Finder(program).regions() if region.gains(program, mesh_of, latency)]
    return _rewritten(program, regions)


@dataclasses.dataclass(slots=True)
class _Region:
    """Sums of one shape that are completed, and all that is made of them alone, element by element.

    ``sums``, ``ops``: indices of instructions; ``members``: the slots that they make. ``whole``: those of them that something else needs
    whole; ``parts``: the indices of redistributions that take a shard of one.
    """

    model: Reshard
    shape: list[int]
    sums: list[int] = dataclasses.field(default_factory=list)
    ops: list[int] = dataclasses.field(default_factory=list)
    members: set[int] = dataclasses.field(default_factory=set)
    whole: dict[int, str] = dataclasses.field(default_factory=dict)
    parts: list[int] = dataclasses.field(default_factory=list)
    dim: int = 0

    @property
    def axis(self) -> int:
        """The mesh axis along which is summed."""
        return _axis_of(self.model)

    @property
    def placements(self) -> tuple:
        """Those of the members, in shards."""
        codes = list(self.model.target_placements)
        codes[self.axis] = self.dim
        return tuple(codes)

    def gains(self, program: Program, mesh_of: Callable[[int], DeviceMesh], latency: int) -> bool:
        """Whether shards are better; says of which dim."""
        mesh = mesh_of(self.model.source_mesh)
        pieces = mesh.shape[self.axis]
        taken = {code for code in self.model.target_placements if code != _WHOLE}
        wanted = [one.target_placements[self.axis] for one in (program.body[i] for i in self.parts)]  # type: ignore[union-attr]
        dims = [d for d, size in enumerate(self.shape) if d not in taken and size >= pieces]
        if pieces == 1 or not dims or not (self.ops or self.parts):
            return False
        self.dim = max(dims, key=lambda d: (wanted.count(d), self.shape[d] % pieces == 0, -d))

        def cost(source: tuple, target: tuple, dtype: str) -> tuple[int, int]:
            first = mesh.device_ids[0]  # no other device gets more
            parts = steps(mesh, decode(source), mesh, decode(target), tuple(self.shape), dtype_called(dtype), first)
            nbytes = sum(part.received_bytes() for part in parts)
            return nbytes, nbytes + latency if nbytes else 0

        old: list[tuple[int, int]] = []
        new: list[tuple[int, int]] = []
        for index in self.sums:
            one: Any = program.body[index]
            old.append(cost(one.source_placements, one.target_placements, one.dtype))
            new.append(cost(one.source_placements, self.placements, one.dtype))
        for index in self.parts:
            one = program.body[index]
            new.append(cost(self.placements, one.target_placements, one.dtype))
        new += [cost(self.placements, self.model.target_placements, dtype) for dtype in self.whole.values()]
        nbytes = math.prod(self.shape) * dtype_called(self.model.dtype).itemsize
        computed = len(self.ops) * nbytes * (pieces - 1) // pieces
        less_sent = sum(sent for sent, _ in new) <= sum(sent for sent, _ in old)
        return less_sent and sum(c for _, c in new) < sum(c for _, c in old) + computed


class _Finder:
    """Finds the regions of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        memory = memory_of(program)
        self._written = frozenset().union(*memory.written)
        self._of: dict[int, _Region] = {}
        self._dtypes: dict[int, str] = {}

    def regions(self) -> list[_Region]:
        for index, instruction in enumerate(self._program.body):
            self._grow(index, instruction)
        found = list({id(region): region for region in self._of.values()}.values())
        ended = [region for region in found if not region.members & self._written]
        members = {slot: region for region in ended for slot in region.members}
        for index, instruction in enumerate(self._program.body):
            for slot in slots_of(instruction):
                region = members.get(slot)
                if region is not None and index not in region.ops:
                    self._leave(region, slot, index, instruction)
        for slot in self._program.outputs:
            if slot in members:
                members[slot].whole[slot] = self._dtypes[slot]
        return ended

    def _grow(self, index: int, instruction: Instruction) -> None:
        if isinstance(instruction, Reshard):
            shape = self._program.constant(instruction.shape)
            if shape and _completes_a_sum(instruction) and math.prod(shape):
                region = self._of[instruction.out] = _Region(instruction, shape)
                region.sums.append(index)
                region.members.add(instruction.out)
                self._dtypes[instruction.out] = instruction.dtype
            return
        if not _is_pointwise(instruction) or any(slot not in self._of for slot in slots_of(instruction)):
            return
        first, *others = {id(self._of[slot]): self._of[slot] for slot in slots_of(instruction)}.values()
        dtype = self._dtype(instruction, len(first.shape))  # type: ignore[arg-type]
        if dtype is None or not all(_alike(first, other) for other in others):
            return
        for other in others:
            first.sums += other.sums
            first.ops += other.ops
            first.members |= other.members
            self._of.update(dict.fromkeys(other.members, first))
        (out,) = outs_of(instruction)
        self._of[out] = first
        self._dtypes[out] = dtype
        first.ops.append(index)
        first.members.add(out)

    def _dtype(self, call: Op, rank: int) -> str | None:
        """The dtype of what an op makes of members of so many dims; None where that cannot be told."""

        def example(value: Any) -> Any:
            if isinstance(value, Slot):
                return torch.ops.aten.zeros.default(
                    [1] * rank, dtype=dtype_called(self._dtypes[value.index]), device="cpu"
                )
            if isinstance(value, (Const, LocalShape, list)) or (isinstance(value, Operand) and self._varies(value)):
                raise TypeError
            return self._program.constant(value) if isinstance(value, Operand) else value

        try:
            args = [example(value) for value in call.args]
            # On one element: meta kernels take seconds to import.
            made = op_called(call.name)(*args, **{name: example(value) for name, value in call.kwargs.items()})
        except (TypeError, RuntimeError):
            return None
        return dtype_name(made.dtype)

    def _varies(self, operand: Operand) -> bool:
        return operand.index < self._program.operands

    def _leave(self, region: _Region, slot: int, index: int, instruction: Instruction) -> None:
        """Something that is no member uses a member."""
        if (
            isinstance(instruction, Reshard)
            and instruction.source_mesh == instruction.target_mesh
            and _differing(instruction.source_placements, instruction.target_placements) == [region.axis]
            and type(instruction.target_placements[region.axis]) is int
        ):
            region.parts.append(index)
        else:
            region.whole[slot] = self._dtypes[slot]


def _rewritten(program: Program, regions: list[_Region]) -> Rewritten:
    """``program`` with the members of ``regions`` in shards."""
    rewriter = Rewriter(program)
    of = {slot: region for region in regions for slot in region.members}
    inside = {index for region in regions for index in (*region.sums, *region.ops)}
    parts = {index for region in regions for index in region.parts}
    kept = frozenset().union(*memory_of(program).written) | set(program.outputs) if regions else frozenset()
    gathered: dict[int, int] = {}
    same: dict[int, int] = {}

    def gather(slot: int, source: int) -> int:
        """The slot of what is whole of a member."""
        if slot in of and slot not in gathered:
            region = of[slot]
            gathered[slot] = rewriter.slot()
            move = msgspec.structs.replace(
                region.model,
                source=slot,
                source_placements=region.placements,
                out=gathered[slot],
                dtype=region.whole[slot],
                order=None,
            )
            rewriter.emit(move, source)
        return gathered.get(slot, slot)

    made: dict[int, int] = {}
    for index, instruction in enumerate(program.body):
        if index in parts:
            assert isinstance(instruction, Reshard)
            placements = of[instruction.source].placements
            if placements == tuple(instruction.target_placements) and instruction.out not in kept:
                same[instruction.out] = instruction.source
            else:
                rewriter.emit(msgspec.structs.replace(instruction, source_placements=placements), index)
        elif index in inside:
            if isinstance(instruction, Reshard):
                placements = of[instruction.out].placements
                instruction = msgspec.structs.replace(instruction, target_placements=placements)
            rewriter.emit(instruction, index)
        else:
            used = {slot: gather(slot, index) for slot in slots_of(instruction)}
            rewriter.emit(renamed(instruction, lambda s: same.get(s, used.get(s, s)), Operand), index)  # noqa: B023
        made.update(dict.fromkeys(outs_of(instruction), index))
    outputs = [gather(slot, made[slot]) if slot in of else slot for slot in program.outputs]
    return rewriter.done(outputs)


def _completes_a_sum(move: Reshard) -> bool:
    """Whether it is an all-reduce along one axis, into a contiguous tensor."""
    changed = _differing(move.source_placements, move.target_placements)
    return (
        move.source_mesh == move.target_mesh
        and len(changed) == 1
        and move.source_placements[changed[0]] == "sum"
        and move.target_placements[changed[0]] == _WHOLE
        and all(type(code) is int for code in move.target_placements)
        and (move.order is None or move.order == sorted(move.order))
    )


def _is_pointwise(instruction: Instruction) -> bool:
    """Whether each element of its one result depends on the same element of its inputs, and on nothing else."""
    if not isinstance(instruction, Op) or len(instruction.outs) != 1 or instruction.outs[0] < 0:
        return False
    op = op_called(instruction.name)
    return (
        op is not None
        and op.namespace == "aten"
        and torch.Tag.pointwise in op.tags
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
        and bool(slots_of(instruction))
        and all(order is None or order == sorted(order) for order in instruction.orders)
    )


def _alike(one: _Region, other: _Region) -> bool:
    """Whether they can be one."""
    a, b = one.model, other.model
    return (
        one.shape == other.shape
        and a.source_mesh == b.source_mesh
        and a.target_placements == b.target_placements
        and one.axis == other.axis
    )


def _axis_of(move: Reshard) -> int:
    return _differing(move.source_placements, move.target_placements)[0]


def _differing(one: tuple, other: tuple) -> list[int]:
    return [axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
