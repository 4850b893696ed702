"""Transfers of small values that are made again and again, with all that does not depend on the values found out beforehand.

A small value takes a few microseconds to copy, and many times that to plan, allocate for and cut up. So the second time that a
transfer is made its publisher gets a ring of slots, and its reader one torch call that puts the result together. What they put
into shared memory is what everybody else puts there: each end of a transfer decides for itself whether it is prepared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import memory_pool
from ...sharding.layout import Box, box_shape
from ...sharding.pieces import Piece
from ...sharding.transfer import Transfer
from ..assemble import COMBINE, around, combine_all, cut
from ..poison import Poison
from .arena import Arena
from .control import ANNOUNCED, COUNTED, CREDIT, ENTRY, LARGE_CREDIT, Control
from .links import HEADER, WHOLE, Link

#: Larger values take longer to copy than to plan for.
MOST_BYTES = 1 << 20

Publish = Callable[[torch.Tensor], None]
"""Lets the others read a value, in the transfers that their links have just been counted up to."""
Collect = Callable[[torch.Tensor | None, dict[int, int] | None], torch.Tensor | Poison | None]
"""The result, of this device's own value and the others' in the transfers of these numbers, or the last ones; None: some come otherwise."""
Resolve = Callable[[Link, int, torch.dtype], torch.Tensor | Poison | None]
"""What the entry at an index of the control page tells of, None if that does not lie anywhere as a whole."""

_DIRECT = frozenset(("sum", "product", "max", "min"))
_KEPT_VIEWS = 64
# Of values of up to so many bytes all slots stay in the caches.
_SMALL_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What is prepared of a transfer: nothing the first time.

    Attributes:
        in_shares: as a whole it is an all-reduce in shares.
        is_broadcast: as a whole it is a large broadcast of this device's.
        is_ready: what can be prepared is.
        shape: of this device's own tensor, None if it has none.
    """

    transfer: Transfer
    in_shares: bool
    is_broadcast: bool
    is_ready: bool = False
    shape: torch.Size | None = None
    publish: Publish | None = None
    collect: Collect | None = None

    def fits(self, value: torch.Tensor | Poison | None) -> bool:
        """Whether it was prepared for such a ``value``."""
        if type(value) is torch.Tensor:
            return value.shape == self.shape and value.dtype is self.transfer.dtype
        return value is None and self.shape is None


def slots_of(nbytes: int) -> int:
    """How many values of so many bytes may be waiting to be read."""
    return CREDIT if nbytes <= _SMALL_BYTES else LARGE_CREDIT


class Ring:
    """Slots of the arena by turns. A publisher waits for readers that are as many transfers behind, so the next slot is free."""

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._region = arena.region
        self._offsets = [arena.allocate(nbytes) for _ in range(slots_of(nbytes))]
        self._views: dict[tuple[torch.Size, torch.dtype], list[tuple[torch.Tensor, array]]] = {}
        self.turn = 0

    def slots(self, shape: torch.Size, dtype: torch.dtype) -> list[tuple[torch.Tensor, array]]:
        """Each slot as a tensor of ``shape``, and the entry that tells of it."""
        found = self._views.get((shape, dtype))
        if found is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            found = self._views[shape, dtype] = [
                (self._region.view(offset, shape, dtype), array("q", (offset, WHOLE, 0, len(shape), *shape)))
                for offset in self._offsets
            ]
        return found


def publisher(
    control: Control, device: int, links: Sequence[Link], ring: Ring, value: torch.Tensor, kept: Box | None
) -> Publish:
    """What lets the others read tensors like ``value``, but for what is ``kept``."""
    words, wait, announce = control.words, control.wait, control.announce
    slots = ring.slots(value.shape, value.dtype)
    credit, size = len(slots), len(slots[0][1])
    shown = around(value.shape, kept)
    # One copy of all is faster than several of what does not lie together.
    if value.nbytes <= _SMALL_BYTES or not all(cut(slots[0][0], box).is_contiguous() for box in shown):
        shown = around(value.shape, None)
    indices = [_index(box, value.shape) for box in shown]
    parts = [[cut(slot, box) for box in shown] for slot, _ in slots]

    def publish(value: torch.Tensor) -> None:
        for link in links:
            past = (link.count - credit) * COUNTED
            if words[link.left] < past:
                wait(link.peer, link.left, past)
        turn = ring.turn = (ring.turn + 1) % credit
        entry = slots[turn][1]
        for part, index in zip(parts[turn], indices, strict=True):
            part.copy_(value if index is None else value[index])
        for link in links:
            count = link.count
            at = link.entries + count % CREDIT * ENTRY
            words[at + 1 : at + 1 + size] = entry
            words[at] = count * COUNTED
        announce(device)

    return publish


def collector(
    control: Control, links: dict[int, Link], transfer: Transfer, own: torch.Size | None, resolve: Resolve
) -> Collect | None:
    """What puts together the result of ``transfer``; None if that takes more than one torch call.

    Args:
        own: the shape of this device's value.
    """
    finish = _finish_of(transfer)
    if finish is None:
        return None
    words, wait, dtype = control.words, control.wait, transfer.dtype
    pieces: list[tuple[Link | None, Box, Any, dict[bytes, torch.Tensor]]] = [
        (links.get(piece.device), piece.source, _index(piece.source, own), {})
        for term in transfer.terms
        for piece in term
    ]
    width = HEADER + len(pieces[0][1])

    def collect(value: torch.Tensor | None, numbers: dict[int, int] | None) -> torch.Tensor | Poison | None:
        parts: list[Any] = []
        for link, box, index, views in pieces:
            if link is None:
                parts.append(value if index is None else value[index])  # type: ignore[index]
                continue
            number = link.count if numbers is None else numbers[link.peer]
            at = link.arrivals + number % CREDIT * ENTRY
            there = (number - 1) * COUNTED + ANNOUNCED
            if words[at] < there:
                wait(link.peer, at, there)
            entry = words[at + 1 : at + width].tobytes()
            part = views.get(entry)
            if part is None:
                found = resolve(link, at, dtype)
                if not isinstance(found, torch.Tensor):
                    return found
                if len(views) >= _KEPT_VIEWS:
                    views.clear()
                part = views[entry] = cut(found, box)
            parts.append(part)
        return finish(parts)

    return collect


def _index(box: Box, shape: torch.Size | None) -> tuple[slice, ...] | None:
    """What cuts ``box`` out of a tensor of ``shape``; None if that is all of it."""
    return None if box_shape(box) == shape else tuple(slice(start, stop) for start, stop in box)


def _finish_of(transfer: Transfer) -> Callable[[list[torch.Tensor]], torch.Tensor] | None:
    """The torch call that makes the result, fresh and contiguous, of its pieces."""
    terms, shape, dtype = transfer.terms, transfer.shape, transfer.dtype
    assert shape is not None
    pooled = math.prod(shape) * dtype.itemsize >= memory_pool.SMALLEST_BYTES
    out = functools.partial(memory_pool.empty, shape, dtype)
    if len(terms) > 1:
        if transfer.zeros or any(len(term) != 1 or box_shape(term[0].target) != shape for term in terms):
            return None
        op = transfer.reduce_op
        if pooled:
            return lambda parts: combine_all(op, parts, out())
        return functools.partial(_reduced, op, shape)
    if transfer.zeros or not terms or not terms[0]:
        return None
    if len(terms[0]) == 1:
        if pooled:
            return lambda parts: out().copy_(parts[0])
        return lambda parts: parts[0].clone(memory_format=torch.contiguous_format)
    dim = _cut_dim(terms[0], shape)
    if dim is None:
        return None
    if pooled:
        return lambda parts: torch.cat(parts, dim, out=out())
    return lambda parts: torch.cat(parts, dim)


def _reduced(op: str, shape: tuple[int, ...], parts: list[torch.Tensor]) -> torch.Tensor:
    first, second = parts[0], parts[1]
    if not (first.is_contiguous() and second.is_contiguous()):
        return combine_all(op, parts, torch.empty(shape, dtype=first.dtype))
    return COMBINE[op](first, second) if len(parts) == 2 and op in _DIRECT else combine_all(op, parts)


def _cut_dim(term: tuple[Piece, ...], shape: tuple[int, ...]) -> int | None:
    """The dim along which the pieces, in their order, stand side by side; None if there is none."""
    for dim, size in enumerate(shape):
        end = 0
        for piece in term:
            start, stop = piece.target[dim]
            others = [side == (0, length) for side, length in zip(piece.target, shape, strict=True)]
            others[dim] = True
            if start != end or not all(others):
                break
            end = stop
        else:
            if end == size:
                return dim
    return None


def is_small(transfer: Transfer, value: torch.Tensor | None) -> bool:
    """Whether a transfer is worth preparing, of which this device holds ``value``."""
    if transfer.source_type != "cpu" or transfer.target_type != "cpu":
        return False
    if transfer.shape is not None and not 0 < math.prod(transfer.shape) * transfer.dtype.itemsize <= MOST_BYTES:
        return False
    return value is None or (0 < value.nbytes <= MOST_BYTES and value.dtype is transfer.dtype)
