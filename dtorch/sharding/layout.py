"""Which part of a tensor a device holds.

A dim sharded by one axis is split as ``torch.chunk`` splits it; by several axes, by each in turn in the order of the axes.
A part is therefore always a *box*: one half-open range per dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..placement import Placement, is_shard

Box = tuple[tuple[int, int], ...]


def chunk(size: int, pieces: int, index: int) -> tuple[int, int]:
    """The half-open range that piece ``index`` of ``torch.chunk`` takes of ``size`` elements; empty for the last ones if too few."""
    step = -(-size // pieces)
    return min(index * step, size), min((index + 1) * step, size)


def local_box(
    placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int], shape: Sequence[int]
) -> Box:
    """The box of a tensor of global ``shape`` that the device at ``coordinate`` holds."""
    box = [(0, size) for size in shape]
    for placement, pieces, index in zip(placements, mesh_shape, coordinate, strict=True):
        if is_shard(placement):
            start, stop = box[placement.dim]  # type: ignore[attr-defined]
            low, high = chunk(stop - start, pieces, index)
            box[placement.dim] = (start + low, start + high)  # type: ignore[attr-defined]
    return tuple(box)


def box_shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def local_shape(
    placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...]:
    """The shape of what the device at ``coordinate`` holds."""
    return box_shape(local_box(placements, mesh_shape, coordinate, shape))
