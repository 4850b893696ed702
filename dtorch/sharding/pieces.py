"""Pieces: which boxes of which devices' local tensors make up a box of the whole."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from ..mesh import DeviceMesh
from ..placement import Placement, PlacementList, is_shard
from .layout import Box

Choices = tuple[tuple[int, ...] | None, ...]
"""For each mesh axis the coordinates allowed along it; None for all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of one device's local source tensor, and where it goes in the result."""

    device: int
    source: Box
    target: Box


@functools.lru_cache(maxsize=16384)
def terms_of(
    mesh: DeviceMesh,
    source: PlacementList,
    shape: tuple[int, ...],
    box: Box,
    choices: Choices,
    reduced: tuple[int, ...],
) -> tuple[tuple[Piece, ...], ...]:
    """For each combination of coordinates along the axes ``reduced``, in order, the pieces that make up ``box``.

    Cached, so that replicas in one process share one tuple: the simulation puts it together only once.
    """
    if any(start == stop for start, stop in box):
        return ((),)
    terms = []
    for addend in itertools.product(*(range(mesh.shape[axis]) for axis in reduced)):
        fixed = list(choices)
        for axis, index in zip(reduced, addend, strict=True):
            fixed[axis] = (index,)
        pieces = []
        for coordinate, held in holders(source, mesh.shape, shape, box, tuple(fixed)):
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, box, strict=True)]
            pieces.append(
                Piece(
                    device=device_at(mesh, coordinate),
                    source=tuple((a - low, b - low) for (a, b), (low, _) in zip(both, held, strict=True)),
                    target=tuple((a - low, b - low) for (a, b), (low, _) in zip(both, box, strict=True)),
                )
            )
        terms.append(tuple(pieces))
    return tuple(terms)


def holders(
    placements: Sequence[Placement], mesh_shape: Sequence[int], shape: Sequence[int], box: Box, choices: Choices
) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The coordinates among ``choices`` whose local boxes meet ``box``, with those boxes. No others are looked at."""
    ranges = [(0, size) for size in shape]
    coordinate = [0] * len(mesh_shape)

    def descend(axis: int) -> Iterator[tuple[tuple[int, ...], Box]]:
        if axis == len(mesh_shape):
            yield tuple(coordinate), tuple(ranges)
            return
        allowed, placement = choices[axis], placements[axis]
        if not is_shard(placement):
            for index in range(mesh_shape[axis]) if allowed is None else allowed:
                coordinate[axis] = index
                yield from descend(axis + 1)
            return
        dim = placement.dim  # type: ignore[attr-defined]
        low, high = ranges[dim]
        step = -(-(high - low) // mesh_shape[axis])
        first = (max(box[dim][0], low) - low) // step
        last = (min(box[dim][1], high) - low - 1) // step
        for index in range(first, last + 1):
            if allowed is None or index in allowed:
                coordinate[axis] = index
                ranges[dim] = (low + index * step, min(low + (index + 1) * step, high))
                yield from descend(axis + 1)
        ranges[dim] = (low, high)

    if all(start < stop for start, stop in box):
        yield from descend(0)


def device_at(mesh: DeviceMesh, coordinate: Sequence[int]) -> int:
    """The id of the device at ``coordinate``."""
    rank = 0
    for size, index in zip(mesh.shape, coordinate, strict=True):
        rank = rank * size + index
    return mesh.device_ids[rank]
