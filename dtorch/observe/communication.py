"""What one run of a program communicates: pure functions on programs and their operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import REPLICATE, PlacementList, decode, is_partial, is_shard, shard
from ..program.ir import Program, Rearrange, Reshard, ReshardDone, Roles, ShiftStart
from ..raw import dtype_called
from ..sharding import transfer
from ..sharding.rearrange import rearrange
from ..sharding.sequence import Sizes


@dataclass(frozen=True, slots=True)
class Communication:
    """One redistribution between devices.

    Args:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``transfer`` between meshes, or ``shift``, one hop of a
            ring; of that, ``shape`` and the placements are not told.
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
) -> dict[int, Communication]:
    """Each redistribution of one run of ``program`` in which a device receives something, by the instruction's index."""
    found: dict[int, Communication] = {}
    for index, instruction in enumerate(program.body):
        of = _OF.get(type(instruction))
        one = None if of is None else of(instruction, operands, mesh_of, op, asked_for, line)
        if one is not None:
            found[index] = one
    return found


def _of_shift(
    hop: ShiftStart, operands: Sequence[Any], mesh_of: Callable[[int], DeviceMesh], op: str, asked_for: bool, line: str
) -> Communication:
    mesh, dtype = mesh_of(hop.mesh), dtype_called(hop.dtype)
    most, every = operands[hop.nbytes.index]
    axes, nowhere = _named(mesh, hop.axes), PlacementList()
    return Communication("shift", most, every, axes, (), dtype, nowhere, nowhere, mesh, mesh, op, asked_for, line)


def _of_reshard(
    move: Reshard, operands: Sequence[Any], mesh_of: Callable[[int], DeviceMesh], op: str, asked_for: bool, line: str
) -> Communication | None:
    mesh, target_mesh = mesh_of(move.source_mesh), mesh_of(move.target_mesh)
    source, target = decode(move.source_placements), decode(move.target_placements)
    shape, dtype = tuple(operands[move.shape.index]), dtype_called(move.dtype)
    where = (mesh, source, target_mesh, target, shape)
    kind = transfer.kind(*where)
    if kind == "local":
        return None
    received = transfer.moved_bytes(*where, dtype).values()
    axes = () if kind == "transfer" else _named(mesh, _changed(mesh, source, target))
    return Communication(
        kind, max(received), sum(received), axes, shape, dtype, source, target, mesh, target_mesh, op, asked_for, line
    )  # fmt: skip


def _of_rearrange(
    move: Rearrange, operands: Sequence[Any], mesh_of: Callable[[int], DeviceMesh], op: str, asked_for: bool, line: str
) -> Communication | None:
    mesh, dtype, given = mesh_of(move.mesh), dtype_called(move.dtype), operands[move.shape.index]
    count = len(Sizes._fields)
    sizes, shape = Sizes(*given[:count]), tuple(given[count:])
    placements = decode(move.placements)
    parts = rearrange(mesh, move.kind, move.back, placements, move.roles, move.is_causal, sizes, shape, dtype)
    received = [part.received_bytes() for part in parts.values()]
    if not any(received):
        return None
    there = _attention_placements(move.kind, move.roles, placements)
    source, target = (there, placements) if move.back else (placements, there)
    summed = any(len(part.terms) > 1 for part in parts.values())
    gathered = move.roles.keys and move.kind == ("parts" if move.back else "query")
    kind = "reduce_scatter" if summed else "all_gather" if gathered else "all_to_all"
    axes = [a for a, (p, r) in enumerate(zip(placements, there, strict=True)) if p != r]
    if move.is_causal:  # a zigzag moves rows along the ring, too
        axes = sorted({*axes, *move.roles.ring})
    return Communication(
        kind, max(received), sum(received), _named(mesh, axes), shape, dtype, source, target, mesh, mesh, op, asked_for, line
    )  # fmt: skip


_OF: dict[type, Callable[..., Communication | None]] = {
    Reshard: _of_reshard,
    ReshardDone: lambda half, *args: _of_reshard(half.move, *args),
    Rearrange: _of_rearrange,
    ShiftStart: _of_shift,
}


def _attention_placements(kind: str, roles: Roles, placements: PlacementList) -> PlacementList:
    """Where a tensor is while attention computes, as far as placements can tell."""
    found = list(placements)
    for axis in roles.keys:
        found[axis] = shard(2) if kind in ("key", "parts") else REPLICATE
    for dim, axes in enumerate((roles.batch, roles.heads, roles.ring)):
        for axis in axes:
            found[axis] = shard(dim)
    return PlacementList(found)


def _named(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[str | int, ...]:
    return tuple(axis if mesh.mesh_dim_names is None else mesh.mesh_dim_names[axis] for axis in axes)


def _changed(mesh: DeviceMesh, source: PlacementList, target: PlacementList) -> list[int]:
    """The axes along which devices lack something of what they are to have."""
    return [
        axis
        for axis, (size, before, after) in enumerate(zip(mesh.shape, source, target, strict=True))
        if size > 1 and before != after and (is_shard(before) or is_partial(before))
    ]
