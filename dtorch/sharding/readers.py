"""What others read of a device's local tensor: the choices of `transfer`, seen from the other side."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh import DeviceMesh
from ..placement import Placement, is_partial, is_shard
from .layout import Box, local_box
from .pieces import holders


def read_by_others(
    mesh: DeviceMesh,
    source: Sequence[Placement],
    target: Sequence[Placement],
    shape: Sequence[int],
    here: tuple[int, ...],
    axes: Sequence[int],
    free: Sequence[int],
) -> tuple[bool, Box | None]:
    """Whether another device needs what the one at ``here`` holds; the box of it that none does, None if they may need all of it.

    Args:
        axes: those along which devices meet.
        free: those along which a device reads from all.
    """
    box = local_box(source, mesh.shape, here, shape)
    choices: list[tuple[int, ...] | None] = []
    for axis, index in enumerate(here):
        if axis not in axes:
            choices.append((index,))
        elif is_partial(target[axis]) and not is_shard(source[axis]):
            if index and not is_partial(source[axis]):
                return False, None
            choices.append((0,))
        else:
            choices.append(None if axis in free or is_partial(source[axis]) else (index,))
    own = local_box(target, mesh.shape, here, shape)
    is_read = False
    for coordinate, wanted in holders(target, mesh.shape, shape, box, tuple(choices)):
        if coordinate != here:
            is_read = True
            if wanted == own:  # others are elsewhere
                return True, None
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, box, strict=True))
    if not is_read or any(start >= stop for start, stop in both):
        return is_read, None
    return True, tuple((start - low, stop - low) for (start, stop), (low, _) in zip(both, box, strict=True))
