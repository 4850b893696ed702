"""The program: the only thing workers are ever asked to run.

A straight-line list of instructions over slots, with global meaning. Slots ``0 … inputs-1`` are the inputs; every
instruction writes fresh ones. What differs from call to call (sizes, indices, numbers) is not in the program but an
*operand* of its run, so a decode step with a longer cache defines nothing new on the workers.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec

Codes = tuple[Union[int, str], ...]
"""Placements as `dtorch.placement.encode` writes them."""


class Slot(msgspec.Struct, frozen=True, tag="slot"):
    """A value."""

    index: int


class Operand(msgspec.Struct, frozen=True, tag="operand"):
    """The ``index``-th operand of the run: a number, or a (nested) list of numbers."""

    index: int


class Const(msgspec.Struct, frozen=True, tag="const"):
    """A constant msgpack has no type for. ``kind``: dtype, layout, memory_format, complex, int or device (the device's own)."""

    kind: str
    value: str


class LocalShape(msgspec.Struct, frozen=True, tag="local_shape"):
    """The part of the global shape ``shape`` (an `Operand`) that a device holds under ``placements``."""

    shape: Operand
    placements: Codes


Item = Union[None, bool, int, float, str, Slot, Operand, Const, LocalShape]
Arg = Union[Item, list[Union[Item, list[Item]]]]
"""Lists nest at most twice; msgspec cannot read a type that contains itself."""


class Layout(msgspec.Struct, frozen=True):
    """How a tensor lies on the program's mesh: its placements and its global shape."""

    placements: Codes
    shape: Operand


class Op(msgspec.Struct, frozen=True, tag="op"):
    """Run a torch op on what each device holds.

    ``outs``: a slot for each tensor the op returns, flattened; -1 for one that is None or not kept. An op that writes its
    inputs writes the devices' own tensors. ``orders``: for each out, the dims from the largest stride to the smallest, or
    None where any will do; a local result whose order differs is copied into that order.
    """

    name: str
    args: list[Arg]
    kwargs: dict[str, Arg]
    outs: list[int]
    orders: list[list[int] | None] = []


class Fused(msgspec.Struct, frozen=True, tag="fused"):
    """Ops that a device runs as one function, made by a compiler (`dtorch.worker.fused`). They write nothing that is there before.

    In ``body`` slots count anew: ``inputs`` come first. Of what it makes, ``results`` are kept, as ``outs``; no two of them share memory.
    """

    inputs: list[int]
    body: list[Op]
    results: list[int]
    outs: list[int]


class Local(msgspec.Struct, frozen=True, tag="local"):
    """Run one of dtorch's own device functions (`dtorch.worker.functions`): it knows where the device stands.

    Called as ``function(here, *args, **kwargs)``; ``here`` gives the mesh, the coordinate and the boxes of the layouts.
    """

    name: str
    args: list[Arg]
    kwargs: dict[str, Arg]
    outs: list[int]
    inputs: list[Layout] = []
    outputs: list[Layout] = []


class Reshard(msgspec.Struct, frozen=True, tag="reshard"):
    """Bring a tensor to other placements, maybe on another mesh. What communicates, but for attention over a split sequence.

    The result is never an alias of the source. ``order``: its dims from the largest stride to the smallest; None: contiguous.
    """

    source: int
    out: int
    source_mesh: int
    source_placements: Codes
    target_mesh: int
    target_placements: Codes
    shape: Operand
    dtype: str
    order: list[int] | None = None


class ReshardStart(msgspec.Struct, frozen=True, tag="reshard_start"):
    """Begin ``move``: each device shows what it holds of the source. What stands before the `ReshardDone` hides the wait for the others.

    Halves end in the order in which they began, and nothing else communicates meanwhile. The source must not be written.
    """

    move: Reshard

    @property
    def source_mesh(self) -> int:
        return self.move.source_mesh

    @property
    def target_mesh(self) -> int:
        return self.move.target_mesh

    @property
    def shape(self) -> Operand:
        return self.move.shape


class ReshardDone(ReshardStart, frozen=True, tag="reshard_done"):
    """End the earliest move that has begun and not ended, which is ``move``."""


class Roles(msgspec.Struct, frozen=True):
    """What each mesh axis splits of an attention: batch, query heads or sequence; an axis in no list splits nothing.

    Axes of one list split one after the other, in the order of the list. Those of ``ring`` make one ring, row by row. Those of
    ``keys`` split keys and values alone, which stay where they are: all queries come to each, and what they find there is merged.
    """

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    ring: tuple[int, ...]
    keys: tuple[int, ...] = ()


class Rearrange(msgspec.Struct, frozen=True, tag="rearrange"):
    """Bring a tensor of an attention from its placements to where the attention computes (`dtorch.sharding.sequence`), or back.

    Back, what several devices computed for one element is added up. The result is never an alias of the source.

    Args:
        kind: ``"query"``, ``"key"``, ``"scores"`` or ``"parts"``: which of the attention's sizes the tensor's dims are.
        back: from the attention to ``placements``.
        shape: the attention's sizes, then the tensor's shape.
        order: as in `Reshard`.
    """

    source: int
    out: int
    mesh: int
    kind: str
    back: bool
    placements: Codes
    roles: Roles
    is_causal: bool
    shape: Operand
    dtype: str
    order: list[int] | None = None

    @property
    def source_mesh(self) -> int:
        return self.mesh

    @property
    def target_mesh(self) -> int:
        return self.mesh


class ShiftStart(msgspec.Struct, frozen=True, tag="shift_start"):
    """Begin to hand a value to the next device of a ring along ``axes``; what stands before the `ShiftDone` hides the way.

    Shifts end in the order in which they began, and nothing else communicates before they have.

    ``nbytes``: the most that a device hands on, and what all do, for reports.
    """

    source: int
    mesh: int
    axes: tuple[int, ...]
    dtype: str
    nbytes: Operand


class ShiftDone(msgspec.Struct, frozen=True, tag="shift_done"):
    """Take what the previous device of the ring handed on in the earliest shift that is not done. Its shape is its own affair."""

    out: int
    mesh: int
    axes: tuple[int, ...]
    dtype: str


Instruction = Union[Op, Fused, Local, Reshard, ReshardStart, ReshardDone, Rearrange, ShiftStart, ShiftDone]
Communication = (Reshard, ReshardStart, Rearrange, ShiftStart, ShiftDone)
"""The instructions in which devices meet; all others are a device's own affair."""


class Program(msgspec.Struct, frozen=True):
    """``name`` is for people. ``mesh`` is the id of the mesh the ops run on; devices of no mesh named in it skip the program.

    An `Operand` past the ``operands`` of a run is one of ``constants``: those of a captured program, which are sent once.
    """

    name: str
    mesh: int
    inputs: int
    operands: int
    body: list[Instruction]
    outputs: list[int]
    constants: list[Any] = []

    def constant(self, operand: Operand) -> Any:
        """What ``operand`` is in every run; None if each run says."""
        return None if operand.index < self.operands else self.constants[operand.index - self.operands]

    def meshes(self) -> set[int]:
        """The ids of every mesh that takes part."""
        found = {self.mesh}
        for instruction in self.body:
            if isinstance(instruction, (Reshard, ReshardStart, Rearrange)):
                found |= {instruction.source_mesh, instruction.target_mesh}
        return found


def slots_of(instruction: Instruction) -> list[int]:
    """The slots that an instruction reads, in order."""
    if isinstance(instruction, ReshardStart):
        return [instruction.move.source]
    if isinstance(instruction, Communication):
        return [] if isinstance(instruction, ShiftDone) else [instruction.source]
    if isinstance(instruction, Fused):
        return instruction.inputs
    found: list[int] = []

    def collect(arg: Any) -> None:
        if isinstance(arg, Slot):
            found.append(arg.index)
        elif isinstance(arg, list):
            for item in arg:
                collect(item)

    collect(instruction.args)
    collect(list(instruction.kwargs.values()))
    return found


def outs_of(instruction: Instruction) -> list[int]:
    """The slots that an instruction writes; -1 for results that are not kept."""
    if isinstance(instruction, ReshardStart):
        return [instruction.move.out] if isinstance(instruction, ReshardDone) else []
    if isinstance(instruction, Communication):
        return [] if isinstance(instruction, ShiftStart) else [instruction.out]
    return instruction.outs
