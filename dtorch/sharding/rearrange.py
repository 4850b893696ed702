"""Rearrange: the transfers that bring an attention's tensors to where it computes and back, and the hops of its ring.

One all-to-all does it all: sequence to heads (Ulysses), contiguous shards to zigzag, key heads to every device whose query heads
need them. Where a device has all that it needs (a ring without a causal mask), nothing is sent. On the way back, addends of one
element are added up: gradients of shared key heads, of broadcast masks, of replicated inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import torch

from ..mesh import DeviceMesh
from ..placement import PlacementList, is_shard
from ..program.ir import Roles
from .layout import Box, box_shape, local_box
from .pieces import Choices, Piece, device_at, terms_of
from .sequence import Sizes, at_ring_place, boxes, ring_place
from .transfer import Transfer


@functools.lru_cache(maxsize=1024)
def rearrange(
    mesh: DeviceMesh,
    kind: str,
    back: bool,
    placements: PlacementList,
    roles: Roles,
    is_causal: bool,
    sizes: Sizes,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> dict[int, Transfer]:
    """Every device's part. ``placements`` has no pending sums; ``kind``: see `dtorch.sharding.sequence.boxes`.

    ``back``: from the attention to ``placements``. Devices that differ along an axis that splits nothing hold the same.
    """
    attention = {
        coordinate: boxes(kind, roles, is_causal, sizes, mesh.shape, coordinate, shape)
        for coordinate in itertools.product(*map(range, mesh.shape))
    }
    parts: dict[int, tuple[Box, tuple[tuple[Piece, ...], ...]]] = {}
    for coordinate, held in attention.items():
        if back:
            part = _backward(mesh, placements, roles, attention, coordinate, shape)
        else:
            part = _forward(mesh, placements, held, coordinate, shape)
        parts[device_at(mesh, coordinate)] = part
    groups = _groups({device: terms for device, (_, terms) in parts.items()})
    read = {
        piece.device
        for device, (_, terms) in parts.items()
        for piece in itertools.chain(*terms)
        if piece.device != device
    }
    return {
        device: Transfer(
            device=device,
            group=groups[device],
            publishes=device in read,
            shape=box_shape(box),
            dtype=dtype,
            terms=terms,
            zeros=any(_volume(term) != math.prod(box_shape(box)) for term in terms),
            reduce_op="sum",
            source_type=mesh.device_type,
            target_type=mesh.device_type,
        )
        for device, (box, terms) in parts.items()
    }


def is_needless(
    mesh: DeviceMesh,
    kind: str,
    back: bool,
    placements: PlacementList,
    roles: Roles,
    is_causal: bool,
    sizes: Sizes,
    shape: tuple[int, ...],
) -> bool:
    """Whether every device holds the very same under ``placements`` and in the attention, and there is nothing to add up."""
    seen: set[tuple] = set()
    splitting = {*roles.batch, *roles.heads, *roles.ring, *roles.keys}
    for coordinate in itertools.product(*map(range, mesh.shape)):
        held = boxes(kind, roles, is_causal, sizes, mesh.shape, coordinate, shape)
        if held != [local_box(placements, mesh.shape, coordinate, shape)]:
            return False
        addend = (*(i for axis, i in enumerate(coordinate) if axis not in splitting), held[0])
        if back and math.prod(box_shape(held[0])) and addend in seen:
            return False
        seen.add(addend)
    return True


def _forward(
    mesh: DeviceMesh, placements: PlacementList, held: list[Box], coordinate: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Box, tuple[tuple[Piece, ...], ...]]:
    """The pieces of the device's ``held`` boxes, of which each replica has its own source."""
    choices: Choices = tuple(None if is_shard(p) else (i,) for p, i in zip(placements, coordinate, strict=True))
    pieces = tuple(
        Piece(piece.device, piece.source, _moved(piece.target, local[2][0]))
        for box, local in _stacked(held)
        for piece in terms_of(mesh, placements, shape, box, choices, ())[0]
    )
    return (*held[0][:2], (0, sum(box[2][1] - box[2][0] for box in held)), *held[0][3:]), (pieces,)


def _backward(
    mesh: DeviceMesh,
    placements: PlacementList,
    roles: Roles,
    attention: dict[tuple[int, ...], list[Box]],
    coordinate: tuple[int, ...],
    shape: tuple[int, ...],
) -> tuple[Box, tuple[tuple[Piece, ...], ...]]:
    """The pieces of the device's box under ``placements``; a term holds no element twice."""
    target = local_box(placements, mesh.shape, coordinate, shape)
    splitting = {*roles.batch, *roles.heads, *roles.ring, *roles.keys}
    terms: list[list[Piece]] = [[]]
    for other in itertools.product(
        *(range(n) if a in splitting else (coordinate[a],) for a, n in enumerate(mesh.shape))
    ):
        for box, local in _stacked(attention[other]):
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, target, strict=True)]
            if any(start >= stop for start, stop in both):
                continue
            source = tuple((a - low, b - low) for (a, b), (low, _) in zip(both, box, strict=True))
            piece = Piece(
                device_at(mesh, other),
                _moved(source, local[2][0]),
                tuple((a - low, b - low) for (a, b), (low, _) in zip(both, target, strict=True)),
            )
            for term in terms:
                if not any(_overlap(piece.target, present.target) for present in term):
                    term.append(piece)
                    break
            else:
                terms.append([piece])
    return target, tuple(tuple(term) for term in terms)


def _stacked(held: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Each box, with the one that it is of the local tensor."""
    row = 0
    for box in held:
        start, stop = box[2]
        yield box, (*box[:2], (row, row + stop - start), *box[3:])
        row += stop - start


def _moved(box: Box, rows: int) -> Box:
    return (*box[:2], (box[2][0] + rows, box[2][1] + rows), *box[3:])


def _overlap(a: Box, b: Box) -> bool:
    return all(max(p, r) < min(q, s) for (p, q), (r, s) in zip(a, b, strict=True))


def _volume(term: tuple[Piece, ...]) -> int:
    return sum(math.prod(box_shape(piece.target)) for piece in term)


def _groups(terms: dict[int, tuple[tuple[Piece, ...], ...]]) -> dict[int, tuple[int, ...]]:
    """For each device those with which it shares reads, even indirectly."""
    parent = {device: device for device in terms}

    def root(device: int) -> int:
        while parent[device] != device:
            parent[device] = device = parent[parent[device]]
        return device

    for device, parts in terms.items():
        for piece in itertools.chain(*parts):
            parent[root(piece.device)] = root(device)
    members: dict[int, list[int]] = {}
    for device in sorted(terms):
        members.setdefault(root(device), []).append(device)
    return {device: tuple(members[root(device)]) for device in terms}


@dataclasses.dataclass(frozen=True, slots=True)
class Shift:
    """One device's part of a hop along a ring: what it holds goes to ``receiver``, and it gets what ``sender`` held.

    ``starts``: this is where the hop begins, and the device gets nothing yet; else where it ends.
    """

    device: int
    sender: int
    receiver: int
    dtype: torch.dtype
    device_type: str
    starts: bool

    @property
    def group(self) -> tuple[int, ...]:
        """The devices that this one meets, and itself."""
        return tuple(sorted({self.device, self.sender, self.receiver}))


def shift(mesh: DeviceMesh, axes: tuple[int, ...], dtype: torch.dtype, device: int, starts: bool) -> Shift:
    """``device``'s part of a hop to the next device along ``axes``."""
    here = mesh.coordinate(device)
    assert here is not None
    _, place = ring_place(mesh.shape, here, axes)
    sender, receiver = (device_at(mesh, at_ring_place(mesh.shape, here, axes, place + by)) for by in (-1, 1))
    return Shift(device, sender, receiver, dtype, mesh.device_type, starts)
