"""What one run of a program communicates: pure functions on programs and their operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import PlacementList, decode, is_partial, is_shard
from ..program.ir import Program, Reshard
from ..raw import dtype_called
from ..sharding import transfer


@dataclass(frozen=True, slots=True)
class Communication:
    """One redistribution between devices.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, or ``transfer`` between meshes.
        nbytes: what the device that receives most receives from others.
        total_bytes: what all devices receive from others.
        axes: the mesh axes along which devices exchange, by name, or by number where the mesh has no names.
        shape: of the whole tensor; ``dtype`` its type.
        source, target: its placements before and after.
        mesh, target_mesh: where it was, and where it went.
        op: the op that needed it.
        asked_for: the program called ``redistribute``; else dtorch inserted it.
        line: ``file:line: text`` of the user's code; for a backward op that of the forward op, if recording had begun by then.
    """

    kind: str
    nbytes: int
    total_bytes: int
    axes: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: PlacementList
    target: PlacementList
    mesh: DeviceMesh
    target_mesh: DeviceMesh
    op: str
    asked_for: bool
    line: str


def communication_of(
    program: Program, operands: Sequence[Any], mesh_of: Callable[[int], DeviceMesh], op: str, asked_for: bool, line: str
) -> Iterator[Communication]:
    """Each redistribution of one run of ``program`` in which a device receives something."""
    for instruction in program.body:
        if type(instruction) is not Reshard:
            continue
        mesh, target_mesh = mesh_of(instruction.source_mesh), mesh_of(instruction.target_mesh)
        source, target = decode(instruction.source_placements), decode(instruction.target_placements)
        shape, dtype = tuple(operands[instruction.shape.index]), dtype_called(instruction.dtype)
        where = (mesh, source, target_mesh, target, shape)
        kind = transfer.kind(*where)
        if kind == "local":
            continue
        received = transfer.moved_bytes(*where, dtype).values()
        axes = () if kind == "transfer" else tuple(_changed(mesh, source, target))
        yield Communication(
            kind, max(received), sum(received), axes, shape, dtype, source, target, mesh, target_mesh, op, asked_for, line
        )  # fmt: skip


def _changed(mesh: DeviceMesh, source: PlacementList, target: PlacementList) -> Iterator[str | int]:
    for axis, (size, before, after) in enumerate(zip(mesh.shape, source, target, strict=True)):
        if size > 1 and before != after and (is_shard(before) or is_partial(before)):
            yield axis if mesh.mesh_dim_names is None else mesh.mesh_dim_names[axis]
