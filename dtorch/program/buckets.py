"""Buckets: small sums of a captured program that are completed together, by one all-reduce.

Each gradient of data-parallel training is a sum over the devices, and a small all-reduce costs its latency, not its bytes. So sums
wait for others until something needs one of them, as those of `torch.nn.parallel.DistributedDataParallel` do (Li et al., VLDB 2020).
Every element is added as it would be alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..raw import dtype_called
from .effects import effects
from .ir import Arg, Instruction, Local, Op, Operand, Reshard, ShiftDone, ShiftStart, Slot, slots_of

#: Bytes of the largest sum that waits, and of all that wait together.
MEMBER = 64 << 10
BUCKET = 1 << 20


@dataclasses.dataclass(slots=True)
class _Bucket:
    """What waits: each with its global shape and its origin."""

    members: list[tuple[Reshard, list[int], Any]] = dataclasses.field(default_factory=list)
    nbytes: int = 0


class Buckets:
    """Puts the instructions of one program in order.

    Args:
        slots: how many there are.
        constant: makes an operand of a value.
        value: what an operand is in every run, or None.
    """

    def __init__(self, slots: int, constant: Callable[[Any], Operand], value: Callable[[Operand], Any]) -> None:
        self._slots = slots
        self._constant = constant
        self._value = value
        self._open: dict[tuple[Any, ...], _Bucket] = {}
        #: For each sum that waits, where.
        self._waiting: dict[int, tuple[Any, ...]] = {}
        self._body: list[Instruction] = []
        self._origins: list[Any] = []

    def arrange(self, body: Sequence[Instruction], origins: Sequence[Any]) -> tuple[list[Instruction], list[Any]]:
        """The instructions with what is bucketed, and the origin of each."""
        for instruction, origin in zip(body, origins, strict=True):
            for slot in slots_of(instruction):
                if slot in self._waiting:
                    self._close(self._waiting[slot])
            shape = self._shape_of_small(instruction)
            if shape is not None:
                self._add(instruction, shape, origin)  # type: ignore[arg-type]
                continue
            # Nothing else communicates within a shift.
            if _may_write(instruction) or isinstance(instruction, (ShiftStart, ShiftDone)):
                self._close_all()
            self._emit(instruction, origin)
        self._close_all()
        return self._body, self._origins

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
        shape = self._value(instruction.shape)
        if shape is None or not 0 < math.prod(shape) * dtype_called(instruction.dtype).itemsize <= MEMBER:
            return None
        return shape

    def _add(self, reshard: Reshard, shape: list[int], origin: Any) -> None:
        key = reshard.source_mesh, reshard.source_placements, reshard.dtype
        nbytes = math.prod(shape) * dtype_called(reshard.dtype).itemsize
        bucket = self._open.setdefault(key, _Bucket())
        if bucket.nbytes + nbytes > BUCKET:
            self._close(key)
            bucket = self._open[key] = _Bucket()
        bucket.members.append((reshard, shape, origin))
        bucket.nbytes += nbytes
        self._waiting[reshard.out] = key

    def _close_all(self) -> None:
        for key in list(self._open):
            self._close(key)

    def _close(self, key: tuple[Any, ...]) -> None:
        """Complete what waits."""
        members = self._open.pop(key).members
        for reshard, _, _ in members:
            del self._waiting[reshard.out]
        if len(members) == 1:
            ((reshard, _, origin),) = members
            self._emit(reshard, origin)
            return
        sizes = [math.prod(shape) for _, shape, _ in members]
        flat: list[Any] = []
        for (reshard, _, origin), size in zip(members, sizes, strict=True):
            flat.append(Slot(self._slot()))
            args: list[Arg] = [Slot(reshard.source), self._constant([size])]
            self._emit(Op("aten.reshape.default", args, {}, [flat[-1].index]), origin)
        (first, _, origin), joined, whole = members[0], self._slot(), self._slot()
        self._emit(Op("aten.cat.default", [flat], {}, [joined]), origin)
        shape = self._constant([sum(sizes)])
        self._emit(msgspec.structs.replace(first, source=joined, out=whole, shape=shape, order=None), origin)
        parts = [self._slot() for _ in members]
        self._emit(Op("aten.split_with_sizes_copy.default", [Slot(whole), self._constant(sizes)], {}, parts), origin)
        for (reshard, own, origin), part in zip(members, parts, strict=True):
            self._emit(Op("aten.view.default", [Slot(part), self._constant(own)], {}, [reshard.out]), origin)

    def _emit(self, instruction: Instruction, origin: Any) -> None:
        self._body.append(instruction)
        self._origins.append(origin)

    def _slot(self) -> int:
        self._slots += 1
        return self._slots - 1


def _is_pending(code: int | str) -> bool:
    """Whether a placement's code is a reduction's name."""
    return type(code) is str and "/" not in code


def _may_write(instruction: Instruction) -> bool:
    return bool(effects(instruction, {})[0]) or (isinstance(instruction, Local) and not instruction.outs)
