"""Where attention computes: which rows, heads and keys each device takes when the sequence is split.

Axes that split the heads give each device all positions of some heads (Ulysses, arXiv 2309.14509); key heads that several
devices' query heads share are on all of those. Axes of the ring split the positions (Ring Attention, arXiv 2310.01889): a device
keeps its queries while key and value blocks travel. Under a causal mask the positions are cut into twice as many chunks as
there are devices, and device ``i`` takes chunks ``i`` and ``2n - 1 - i`` (zigzag; the imbalance and striped orders: arXiv
2311.09431): then each has the same work, and at each step of the ring. Axes that split the keys alone have all queries come to the keys:
few queries before many keys, as when a decoder has a cache that is split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..program.ir import Roles
from .layout import Box, chunk

Range = tuple[int, int]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which outputs are merged and gradients summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Sizes(NamedTuple):
    """The sizes of an attention."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int


def split(size: int, mesh_shape: Sequence[int], coordinate: Sequence[int], axes: Sequence[int]) -> Range:
    """The range of ``size`` that is left at ``coordinate`` when each of ``axes`` has split it as ``torch.chunk`` does."""
    start, stop = 0, size
    for axis in axes:
        low, high = chunk(stop - start, mesh_shape[axis], coordinate[axis])
        start, stop = start + low, start + high
    return start, stop


def ring_place(mesh_shape: Sequence[int], coordinate: Sequence[int], ring: Sequence[int]) -> tuple[int, int]:
    """The number of devices on the ring, and the place of the one at ``coordinate``."""
    place = 0
    for axis in ring:
        place = place * mesh_shape[axis] + coordinate[axis]
    return math.prod(mesh_shape[axis] for axis in ring), place


def at_ring_place(
    mesh_shape: Sequence[int], coordinate: Sequence[int], ring: Sequence[int], place: int
) -> tuple[int, ...]:
    """The coordinate that differs from ``coordinate`` only in that its ring place is ``place``, counted modulo their number."""
    found = list(coordinate)
    for axis in reversed(ring):
        place, found[axis] = divmod(place, mesh_shape[axis])
    return tuple(found)


def head_range(roles: Roles, sizes: Sizes, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Range:
    """The query heads of a device."""
    return split(sizes.heads, mesh_shape, coordinate, roles.heads)


def kv_head_range(roles: Roles, sizes: Sizes, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> Range:
    """The key heads that the query heads of a device attend to."""
    start, stop = head_range(roles, sizes, mesh_shape, coordinate)
    group = sizes.heads // sizes.kv_heads
    return (start // group, (stop - 1) // group + 1) if start < stop else (0, 0)


def _part(start: int, stop: int, pieces: int, index: int) -> Range:
    """Piece ``index`` of a range cut as evenly as can be, for even work; ``torch.chunk`` may leave the last pieces empty."""
    size = stop - start
    return start + size * index // pieces, start + size * (index + 1) // pieces


def query_ranges(
    roles: Roles, is_causal: bool, sizes: Sizes, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[Range]:
    """The queries of a device, in the order in which it holds them.

    Under a causal mask the first rows, which see ever more keys, are dealt out in a zigzag; rows that see all keys evenly.
    """
    if not is_causal or not roles.ring:
        return [split(sizes.queries, mesh_shape, coordinate, roles.ring)]
    n, place = ring_place(mesh_shape, coordinate, roles.ring)
    ramp = min(sizes.queries, sizes.keys)
    found = [_part(0, ramp, 2 * n, place), _part(0, ramp, 2 * n, 2 * n - 1 - place)]
    return found if ramp == sizes.queries else [*found, _part(ramp, sizes.queries, n, place)]


def key_ranges(
    roles: Roles, is_causal: bool, sizes: Sizes, mesh_shape: Sequence[int], coordinate: Sequence[int]
) -> list[Range]:
    """The keys of the block that is at home on a device, in its order. In a zigzag, keys that no query sees are on none."""
    if not is_causal or not roles.ring:
        return [split(sizes.keys, mesh_shape, coordinate, (*roles.ring, *roles.keys))]
    n, place = ring_place(mesh_shape, coordinate, roles.ring)
    ramp = min(sizes.queries, sizes.keys)
    return [_part(0, ramp, 2 * n, place), _part(0, ramp, 2 * n, 2 * n - 1 - place)]


def boxes(
    kind: str,
    roles: Roles,
    is_causal: bool,
    sizes: Sizes,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    shape: Sequence[int],
) -> list[Box]:
    """What a device holds of a tensor of ``shape`` while attention computes: boxes of the whole, one behind the other along dim 2.

    Args:
        kind: ``"query"``: (batch, heads, queries, …); ``"key"``: (batch, key heads, keys, …); ``"scores"``: (batch, heads,
            queries, keys), in which sizes of 1 are broadcast, so whole; ``"parts"``: (batch, heads, places × queries, …), what the queries
            found at each place along `Roles.keys`, one behind the other.
    """
    whole = [(0, size) for size in shape]
    box = list(whole)
    box[0] = split(sizes.batch, mesh_shape, coordinate, roles.batch)
    box[1] = (kv_head_range if kind == "key" else head_range)(roles, sizes, mesh_shape, coordinate)
    ranges = (key_ranges if kind == "key" else query_ranges)(roles, is_causal, sizes, mesh_shape, coordinate)
    if kind == "parts":
        _, place = ring_place(mesh_shape, coordinate, roles.keys)
        ranges = [(place * sizes.queries, (place + 1) * sizes.queries)]
    if kind == "scores":
        box[:2] = [one if size == 1 else range_ for one, size, range_ in zip(whole, shape, box[:2], strict=False)]
        ranges = [(0, 1)] if shape[2] == 1 else ranges
    return [(*box[:2], range_, *box[3:]) for range_ in ranges]


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """Some of a device's queries against some of the keys of the block before it, as ranges of what it holds.

    ``diagonal``: None where every query sees every key; else key ``j`` of the task is seen by query ``i`` where ``j <= i + diagonal``.
    """

    queries: Range
    keys: Range
    diagonal: int | None

    @property
    def work(self) -> int:
        """The scores that are computed."""
        return (self.queries[1] - self.queries[0]) * (self.keys[1] - self.keys[0])


def tasks(queries: Sequence[Range], keys: Sequence[Range], is_causal: bool) -> list[Task]:
    """What is to be computed of queries at these positions against keys at those; what a causal mask hides is left out."""
    found: list[Task] = []
    row = 0
    for first, last in queries:
        rows = (row, row + last - first)
        row = rows[1]
        column = 0
        seen: Task | None = None
        for start, stop in keys:
            columns = (column, column + stop - start)
            column = columns[1]
            if first == last or start == stop or (is_causal and start >= last):
                continue
            if is_causal and stop - 1 > first:
                found.append(Task(rows, columns, first - start))
                seen = None
            elif seen is not None and seen.keys[1] == columns[0]:  # neighbours in memory: one task
                seen = found[-1] = Task(rows, (seen.keys[0], columns[1]), None)
            else:
                seen = Task(rows, columns, None)
                found.append(seen)
    return found


def step_tasks(
    roles: Roles, is_causal: bool, sizes: Sizes, mesh_shape: Sequence[int], coordinate: Sequence[int], step: int
) -> list[Task]:
    """What a device computes at one step of the ring, against the block that has come to it by then."""
    _, place = ring_place(mesh_shape, coordinate, roles.ring)
    home = at_ring_place(mesh_shape, coordinate, roles.ring, place - step)
    return tasks(
        query_ranges(roles, is_causal, sizes, mesh_shape, coordinate),
        key_ranges(roles, is_causal, sizes, mesh_shape, home),
        is_causal,
    )
