"""Buckets: small sums of a captured program that are completed together, by one all-reduce.

Each gradient of data-parallel training is a sum over the devices, and a small all-reduce costs its latency, not its bytes. So sums
wait for others until something needs one of them, as those of `torch.nn.parallel.DistributedDataParallel` do (Li et al., VLDB 2020).
Every element is added as it would be alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec

from ..raw import dtype_called
from .effects import effects
from .ir import Arg, Instruction, Local, Op, Program, Reshard, ShiftDone, ShiftStart, Slot, slots_of
from .rewrite import Rewriter, Rewritten

#: Bytes of the largest sum that waits, and of all that wait together.
MEMBER = 64 << 10
BUCKET = 1 << 20


def bucket(program: Program) -> Rewritten:
    """``program`` with its small sums in buckets."""
    return _Buckets(program).arranged()


@dataclasses.dataclass(slots=True)
class _Bucket:
    """What waits: each with its global shape and the index of its instruction."""

    members: list[tuple[Reshard, list[int], int]] = dataclasses.field(default_factory=list)
    nbytes: int = 0


class _Buckets:
    """Puts the instructions of one program in order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._rewriter = Rewriter(program)
        self._open: dict[tuple[Any, ...], _Bucket] = {}
        #: For each sum that waits, where.
        self._waiting: dict[int, tuple[Any, ...]] = {}

    def arranged(self) -> Rewritten:
        for index, instruction in enumerate(self._program.body):
            for slot in slots_of(instruction):
                if slot in self._waiting:
                    self._close(self._waiting[slot])
            shape = self._shape_of_small(instruction)
            if shape is not None:
                self._add(instruction, shape, index)  # type: ignore[arg-type]
                continue
            # Nothing else communicates within a shift.
            if _may_write(instruction) or isinstance(instruction, (ShiftStart, ShiftDone)):
                self._close_all()
            self._rewriter.emit(instruction, index)
        self._close_all()
        return self._rewriter.done()

    def _shape_of_small(self, instruction: Instruction) -> list[int] | None:
        """The shape of a small sum on one mesh, completed into a contiguous tensor; None of anything else."""
        if not isinstance(instruction, Reshard) or instruction.source_mesh != instruction.target_mesh:
            return None
        if any(code != -1 for code in instruction.target_placements):
            return None
        if any(code != -1 and not _is_pending(code) for code in instruction.source_placements):
            return None
        if instruction.order is not None and instruction.order != sorted(instruction.order):
            return None
        shape = self._program.constant(instruction.shape)
        if shape is None or not 0 < math.prod(shape) * dtype_called(instruction.dtype).itemsize <= MEMBER:
            return None
        return shape

    def _add(self, reshard: Reshard, shape: list[int], index: int) -> None:
        key = reshard.source_mesh, reshard.source_placements, reshard.dtype
        nbytes = math.prod(shape) * dtype_called(reshard.dtype).itemsize
        bucket = self._open.setdefault(key, _Bucket())
        if bucket.nbytes + nbytes > BUCKET:
            self._close(key)
            bucket = self._open[key] = _Bucket()
        bucket.members.append((reshard, shape, index))
        bucket.nbytes += nbytes
        self._waiting[reshard.out] = key

    def _close_all(self) -> None:
        for key in list(self._open):
            self._close(key)

    def _close(self, key: tuple[Any, ...]) -> None:
        """Complete what waits."""
        members = self._open.pop(key).members
        emit, slot, constant = self._rewriter.emit, self._rewriter.slot, self._rewriter.constant
        for reshard, _, _ in members:
            del self._waiting[reshard.out]
        if len(members) == 1:
            ((reshard, _, index),) = members
            emit(reshard, index)
            return
        sizes = [math.prod(shape) for _, shape, _ in members]
        flat: list[Any] = []
        for (reshard, _, index), size in zip(members, sizes, strict=True):
            flat.append(Slot(slot()))
            args: list[Arg] = [Slot(reshard.source), constant([size])]
            emit(Op("aten.reshape.default", args, {}, [flat[-1].index]), index)
        (first, _, index), joined, whole = members[0], slot(), slot()
        emit(Op("aten.cat.default", [flat], {}, [joined]), index)
        shape = constant([sum(sizes)])
        emit(msgspec.structs.replace(first, source=joined, out=whole, shape=shape, order=None), index)
        parts = [slot() for _ in members]
        emit(Op("aten.split_with_sizes_copy.default", [Slot(whole), constant(sizes)], {}, parts), index)
        for (reshard, own, index), part in zip(members, parts, strict=True):
            emit(Op("aten.view.default", [Slot(part), constant(own)], {}, [reshard.out]), index)


def _is_pending(code: int | str) -> bool:
    """Whether a placement's code is a reduction's name."""
    return type(code) is str and "/" not in code


def _may_write(instruction: Instruction) -> bool:
    return bool(effects(instruction, {})[0]) or (isinstance(instruction, Local) and not instruction.outs)
