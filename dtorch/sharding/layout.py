"""Which part of a tensor a device holds.

A dim sharded by one axis is split as ``torch.chunk`` splits it; by several axes, by each in turn in the order of the axes.
A part is therefore always a *box*: one half-open range per dim. Only of a dim that packs several blocks (`PackedShard`) it is not; whoever
needs a box brings such a tensor elsewhere first (`packing`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..placement import Placement, is_packed, is_shard

Box = tuple[tuple[int, int], ...]


def chunk(size: int, pieces: int, index: int) -> tuple[int, int]:
    """The half-open range that piece ``index`` of ``torch.chunk`` takes of ``size`` elements; empty for the last ones if too few."""
    step = -(-size // pieces)
    return min(index * step, size), min((index + 1) * step, size)


def local_box(
    placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int], shape: Sequence[int]
) -> Box:
    """The box of a tensor of global ``shape`` that the device at ``coordinate`` holds.

    Raises:
        ValueError: a packed dim, whose part is no box.
    """
    if any(map(is_packed, placements)):
        raise ValueError(f"{list(placements)!r}: what a device holds of a packed dim is not one box")
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
    if not any(map(is_packed, placements)):
        return box_shape(local_box(placements, mesh_shape, coordinate, shape))
    held = list(
        local_shape([p for p in placements if not is_packed(p)], *_without(mesh_shape, coordinate, placements), shape)
    )
    for placement, pieces in zip(placements, mesh_shape, strict=True):
        if is_packed(placement):
            held[placement.dim] //= pieces  # type: ignore[attr-defined]
    return tuple(held)


def _without(
    mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Mesh shape and coordinate along the axes that split no packed dim."""
    kept = [axis for axis, placement in enumerate(placements) if not is_packed(placement)]
    return [mesh_shape[axis] for axis in kept], [coordinate[axis] for axis in kept]


def stride_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims from the largest stride to the smallest; ties keep their order, and an expanded dim stands before the one that follows."""
    if 0 in stride:
        steps = list(stride)
        for dim in range(len(steps) - 2, -1, -1):
            steps[dim] = steps[dim] or steps[dim + 1]
        stride = steps
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
