"""Transfer: what one device sends, receives and reduces to bring a tensor from any placements on any mesh to any other.

Every device plans its own part, and all agree without a word. Three choices are fixed by coordinates alone, so both sides
of each read derive them: a replica reads the source replica at its own coordinate; on one mesh, only devices that differ
along axes that change take part (the *fibre*); a Partial target keeps each element at the coordinate that had it, or at 0.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import torch

from ..mesh import DeviceMesh
from ..placement import Placement, PlacementList, is_partial, is_shard, shard
from .layout import Box, box_shape, local_box, local_shape
from .pieces import Choices, Piece, device_at, terms_of
from .readers import read_by_others

#: Up to this many bytes a device, an all-reduce is one phase: a second phase costs a barrier, about what copying 4 KB
#: from a few neighbours costs (two workers on one 2-core machine: 14-19 us for 4 KB).
ONE_PHASE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One device's part of a transfer.

    Args:
        device: this device.
        group: the devices that take part, sorted; just this device if it needs nobody and nobody needs it.
        publishes: another device reads this one's local source tensor.
        shape: the local shape of the result; None if this device gets none.
        dtype: of source and result.
        terms: each a tuple of pieces to be put together; their reduction, in this order, is the result. None at all: zeros.
        zeros: the pieces do not cover the result; the rest is zeros.
        reduce_op: one of `dtorch.placement.REDUCE_OPS`.
        source_type, target_type: of the devices, which says what carries the bytes.
        is_all_reduce: every member of the group holds one of the addends and gets the whole reduction, so that each may reduce
            a share of it and hand that to the others.
        kept: the box of this device's local source tensor that no other reads; None if they may read all of it.
    """

    device: int
    group: tuple[int, ...]
    publishes: bool
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    terms: tuple[tuple[Piece, ...], ...]
    zeros: bool
    reduce_op: str
    source_type: str = "cpu"
    target_type: str = "cpu"
    is_all_reduce: bool = False
    kept: Box | None = None

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """The devices of whose tensors it takes pieces, in the order of the terms."""
        return tuple(dict.fromkeys(piece.device for term in self.terms for piece in term))

    def received_bytes(self) -> int:
        """The bytes that others send to this device."""
        if self.is_all_reduce:
            assert self.shape is not None
            share = -(-math.prod(self.shape) // len(self.group)) * self.dtype.itemsize
            return 2 * (len(self.group) - 1) * share
        return self.dtype.itemsize * sum(
            math.prod(box_shape(piece.target)) for term in self.terms for piece in term if piece.device != self.device
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Half:
    """One end of a transfer. Where it ``starts`` the device shows what it holds, and gets nothing yet; where it ends the others read it."""

    transfer: Transfer
    starts: bool

    @property
    def group(self) -> tuple[int, ...]:
        return self.transfer.group


@functools.lru_cache(maxsize=16384)
def steps(
    source_mesh: DeviceMesh,
    source: PlacementList,
    target_mesh: DeviceMesh,
    target: PlacementList,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
) -> tuple[Transfer, ...]:
    """The transfers that ``device`` takes part in, one after the other; none if it is on neither mesh.

    Usually one. Two where a Partial source goes to many replicas, save by a plain all-reduce of cpu devices, which
    `Transfer.is_all_reduce` describes: reduced into shards first and then gathered, each byte is sent about twice and not once
    to every replica of every addend.

    Raises:
        ValueError: reductions of different kinds to be completed at once, or a pending reduction other than a sum made anew.
    """
    middle = _middle(source_mesh, source, target_mesh, target, shape, dtype)
    if middle is None:
        parts = [_transfer(source_mesh, source, target_mesh, target, shape, dtype, device)]
    else:
        parts = [
            _transfer(source_mesh, source, source_mesh, middle, shape, dtype, device),
            _transfer(source_mesh, middle, target_mesh, target, shape, dtype, device),
        ]
    return tuple(part for part in parts if part is not None)


def moved_bytes(
    source_mesh: DeviceMesh,
    source: PlacementList,
    target_mesh: DeviceMesh,
    target: PlacementList,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[int, int]:
    """For each device of either mesh, the bytes it reads from other devices, all steps together."""
    devices = sorted({*source_mesh.device_ids, *target_mesh.device_ids})
    return {
        device: sum(
            part.received_bytes() for part in steps(source_mesh, source, target_mesh, target, shape, dtype, device)
        )
        for device in devices
    }


def kind(
    source_mesh: DeviceMesh,
    source: PlacementList,
    target_mesh: DeviceMesh,
    target: PlacementList,
    shape: tuple[int, ...],
) -> str:
    """What to call the transfer: local, all_gather, all_to_all, reduce_scatter, all_reduce, or transfer (between meshes)."""
    if not _same_grid(source_mesh, target_mesh):
        return "transfer"
    axes = _fibre_axes(source_mesh.shape, source, target)
    if _is_local(axes, source, target, shape):
        return "local"
    summed = [target[axis] for axis in axes if is_partial(source[axis])]
    if summed:
        return "reduce_scatter" if any(map(is_shard, summed)) else "all_reduce"
    gathered = all(is_shard(source[axis]) and not is_shard(target[axis]) for axis in axes)
    return "all_gather" if gathered else "all_to_all"


def _transfer(
    source_mesh: DeviceMesh,
    source: PlacementList,
    target_mesh: DeviceMesh,
    target: PlacementList,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
) -> Transfer | None:
    part: Transfer | None
    if _same_grid(source_mesh, target_mesh):
        if source_mesh.coordinate(device) is None:
            return None
        part = _within(source_mesh, source, target, shape, dtype, device)
    else:
        part = _between(source_mesh, source, target_mesh, target, shape, dtype).get(device)
    types = source_mesh.device_type, target_mesh.device_type
    if part is None or types == ("cpu", "cpu"):
        return part
    return dataclasses.replace(part, source_type=types[0], target_type=types[1])


# One mesh


def _within(
    mesh: DeviceMesh,
    source: PlacementList,
    target: PlacementList,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
) -> Transfer:
    """``device``'s part on one mesh. Its cost grows with the pieces it reads, not with the mesh."""
    here = mesh.coordinate(device)
    assert here is not None
    axes = _fibre_axes(mesh.shape, source, target)
    reduced = [axis for axis in axes if is_partial(source[axis])]
    reduce_op = _reduce_op(source, target, reduced, axes)
    local = _is_local(axes, source, target, shape)
    box = local_box(target, mesh.shape, here, shape)

    # A device reads from those at its own coordinate along every axis but those whose shards or addends it must collect.
    free = [axis for axis in axes if is_shard(source[axis]) and not is_partial(target[axis])]
    keeps = not any(is_partial(target[axis]) and not is_shard(source[axis]) and here[axis] for axis in axes)
    terms: tuple[tuple[Piece, ...], ...] = ()
    if keeps:
        choices = tuple(None if axis in free else (index,) for axis, index in enumerate(here))
        terms = terms_of(mesh, source, shape, box, choices, tuple(reduced))
    is_read, kept = (False, None) if local else read_by_others(mesh, source, target, shape, here, axes, free)
    return Transfer(
        device=device,
        group=(device,)
        if local
        else _fibre(mesh, tuple(axes), tuple(0 if axis in axes else index for axis, index in enumerate(here))),
        publishes=is_read,
        shape=box_shape(box),
        dtype=dtype,
        terms=terms,
        zeros=not keeps or any(is_shard(source[axis]) and is_partial(target[axis]) for axis in axes),
        reduce_op=reduce_op,
        is_all_reduce=not local and _is_all_reduce(mesh, source, target),
        kept=kept,
    )


def _is_all_reduce(mesh: DeviceMesh, source: PlacementList, target: PlacementList) -> bool:
    """Whether cpu devices add up all of what they hold, and nothing else changes."""
    axes = _fibre_axes(mesh.shape, source, target)
    return mesh.device_type == "cpu" and all(
        is_partial(source[axis]) and not is_shard(target[axis]) and not is_partial(target[axis]) for axis in axes
    )


def _fibre_axes(mesh_shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]) -> list[int]:
    """The axes along which devices must meet: those that change, and those that split a dim which an earlier one changes."""
    axes: list[int] = []
    moved_dims: set[int] = set()
    for axis, (size, before, after) in enumerate(zip(mesh_shape, source, target, strict=True)):
        if size == 1:
            continue
        if before != after or (is_shard(before) and before.dim in moved_dims):  # type: ignore[attr-defined]
            axes.append(axis)
            moved_dims.update(p.dim for p in (before, after) if is_shard(p))  # type: ignore[attr-defined]
    return axes


def _is_local(
    axes: Sequence[int], source: Sequence[Placement], target: Sequence[Placement], shape: Sequence[int]
) -> bool:
    """Whether every device has all that it needs: replicas are cut, or shards become addends padded with zeros."""
    if 0 in shape:
        return True
    return all(
        source[axis] != target[axis]
        and not is_partial(source[axis])
        and (not is_shard(source[axis]) or is_partial(target[axis]))
        for axis in axes
    )


@functools.lru_cache(maxsize=4096)
def _fibre(mesh: DeviceMesh, axes: tuple[int, ...], first: tuple[int, ...]) -> tuple[int, ...]:
    ranges = [range(size) if axis in axes else (first[axis],) for axis, size in enumerate(mesh.shape)]
    return tuple(sorted(device_at(mesh, coordinate) for coordinate in itertools.product(*ranges)))


# Two meshes


@functools.lru_cache(maxsize=1024)
def _between(
    source_mesh: DeviceMesh,
    source: PlacementList,
    target_mesh: DeviceMesh,
    target: PlacementList,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[int, Transfer]:
    """Every device's part between two meshes; devices that share no reads, even indirectly, are in separate groups."""
    reduced = [axis for axis, placement in enumerate(source) if is_partial(placement) and source_mesh.shape[axis] > 1]
    reduce_op = _reduce_op(source, target, reduced, [a for a, size in enumerate(target_mesh.shape) if size > 1])
    terms: dict[int, tuple[tuple[Piece, ...], ...]] = {}
    shapes: dict[int, tuple[int, ...]] = {}
    for rank, device in enumerate(target_mesh.device_ids):
        here = target_mesh.coordinate(device)
        assert here is not None
        box = local_box(target, target_mesh.shape, here, shape)
        shapes[device] = box_shape(box)
        if any(is_partial(placement) and index for placement, index in zip(target, here, strict=True)):
            continue
        choices = _replica(source_mesh, source, device, rank)
        terms[device] = terms_of(source_mesh, source, shape, box, choices, tuple(reduced))

    parent = {device: device for device in (*source_mesh.device_ids, *target_mesh.device_ids)}

    def root(device: int) -> int:
        while parent[device] != device:
            parent[device] = device = parent[parent[device]]
        return device

    read: set[int] = set()
    for device, parts in terms.items():
        for piece in itertools.chain(*parts):
            if piece.device != device:
                read.add(piece.device)
                parent[root(piece.device)] = root(device)
    groups: dict[int, list[int]] = {}
    for device in sorted(parent):
        groups.setdefault(root(device), []).append(device)
    return {
        device: Transfer(
            device=device,
            group=tuple(groups[root(device)]),
            publishes=device in read,
            shape=shapes.get(device),
            dtype=dtype,
            terms=terms.get(device, ()),
            zeros=device in shapes and device not in terms,
            reduce_op=reduce_op,
        )
        for device in parent
    }


def _replica(mesh: DeviceMesh, source: PlacementList, device: int, rank: int) -> Choices:
    """Which replica of the source ``device``, the ``rank``-th of the target mesh, reads: its own, or in turn."""
    own = mesh.coordinate(device)
    choices: list[tuple[int, ...] | None] = []
    for axis, placement in enumerate(source):
        if is_shard(placement) or is_partial(placement):
            choices.append(None)
        elif own is not None:
            choices.append((own[axis],))
        else:
            rank, index = divmod(rank, mesh.shape[axis])
            choices.append((index,))
    return tuple(choices)


# Two phases


def _middle(
    source_mesh: DeviceMesh,
    source: PlacementList,
    target_mesh: DeviceMesh,
    target: PlacementList,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> PlacementList | None:
    """Placements on the source mesh to pass through, its addends reduced into shards; None if one phase is as good."""
    one_mesh = _same_grid(source_mesh, target_mesh)
    if one_mesh and _is_all_reduce(source_mesh, source, target):
        return None
    addends = [axis for axis, placement in enumerate(source) if is_partial(placement) and source_mesh.shape[axis] > 1]
    if one_mesh:
        addends = [axis for axis in addends if not (is_partial(target[axis]) or is_shard(target[axis]))]
    count = math.prod(source_mesh.shape[axis] for axis in addends)
    copies = math.prod(
        n for n, p in zip(target_mesh.shape, target, strict=True) if not is_shard(p) and not is_partial(p)
    )
    # One phase sends size * count to each copy (one mesh: less its own addend); two phases about size * (count + copies).
    if count <= (2 if one_mesh else 1) or copies == 1:
        return None
    held = local_shape(source, source_mesh.shape, (0,) * source_mesh.ndim, shape)
    if math.prod(held) * dtype.itemsize <= ONE_PHASE_BYTES:
        return None
    middle = list(source)
    for axis, placement in enumerate(source):
        if one_mesh and not is_shard(placement) and (is_partial(placement) or is_shard(target[axis])):
            middle[axis] = target[axis]
    # A dim that another axis splits would be split in another order on the way.
    taken = {p.dim for p in (*middle, *(target if one_mesh else ())) if is_shard(p)}  # type: ignore[attr-defined]
    open_dims = [dim for dim, size in enumerate(held) if dim not in taken and size > 1]
    if not open_dims:
        return None
    for axis in addends:
        middle[axis] = shard(max(open_dims, key=held.__getitem__))
    return PlacementList(middle)


def _reduce_op(
    source: Sequence[Placement], target: Sequence[Placement], reduced: Sequence[int], axes: Sequence[int]
) -> str:
    """The one reduction to complete; checks that what is left pending is sums."""
    ops = {source[axis].reduce_op for axis in reduced}  # type: ignore[attr-defined]
    if len(ops) > 1:
        raise ValueError(
            f"reshard: reductions of different kinds cannot be completed at once: {PlacementList(source)!r}"
        )
    for axis in axes:
        if is_partial(target[axis]) and target[axis].reduce_op != "sum":  # type: ignore[attr-defined]
            raise ValueError(f"reshard: only sums can be left pending, got {target[axis]!r} on axis {axis}")
    return ops.pop() if ops else "sum"


def _same_grid(a: DeviceMesh, b: DeviceMesh) -> bool:
    return a is b or (a.device_ids == b.device_ids and a.shape == b.shape)
