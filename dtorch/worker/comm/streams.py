"""Large values, slab by slab.

What is large grows in its block while others read: a slab is read while the next one is copied in, both in the caches. The publisher waits
for nobody.

What an arena has no room for passes through a window of it.
All members of a transfer go through it in step. In each step one publishes its next slab, if it has any left, reads the others', and
tells all that it has done so; a slab takes the place of the one `_SLOTS` before it, once all have told that. Whoever is furthest
behind never waits: the others have published the slabs of its step, and done the steps before the last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from ...raw import copy
from ...sharding.layout import Box, box_shape
from ...sharding.pieces import Piece
from ...sharding.transfer import Transfer
from ..assemble import combine_all, cut, empty
from .arena import Arena, Region
from .control import ANNOUNCED, COUNTED, CREDIT, ENTRY, Control
from .links import Link
from .publications import Reader

_SLOTS = 2
#: The window is this part of the arena, one n-th.
_PART = 4
_MOST_SLABS = COUNTED - 2
#: Values of as many bytes grow, slabs of as many bytes at a time.
GROWING_BYTES = 1 << 23
_GROWN_BYTES = 1 << 22


def grow(
    control: Control, device: int, links: Sequence[Link], block: torch.Tensor, value: torch.Tensor, shown: Sequence[Box]
) -> None:
    """Copy the boxes ``shown`` of ``value`` into its ``block``, of which the others have been told."""
    slabs = growing(value)
    for step in range(1, slabs.count + 1):
        for box in filter(None, (common(slabs.box(step), one) for one in shown)):
            cut(block, box).copy_(cut(value, box))
        for link in links:
            control.words[link.entries + link.count % CREDIT * ENTRY] = (link.count - 1) * COUNTED + ANNOUNCED + step
        control.announce(device)


def growing(value: torch.Tensor) -> Slabs:
    """What ``value`` grows by."""
    return Slabs(tuple(value.shape), _GROWN_BYTES // value.dtype.itemsize)


class Window:
    """The part of an arena that slabs pass through."""

    def __init__(self, arena: Arena, control: Control) -> None:
        assert arena.limit is not None
        size = 1 << (arena.limit // _PART).bit_length() - 1
        self.region = arena.region
        self.offset = arena.allocate(size)
        self.slab_bytes = size // _SLOTS
        self._control = control
        self._readers: list[Reader] = []

    def become(self, readers: list[Reader]) -> None:
        """Serve another value once the one before has been read; ``readers``: of the next one."""
        for peer, word, done in self._readers:
            self._control.wait(peer, word, done)
        self._readers = readers


@dataclasses.dataclass(slots=True)
class Outgoing:
    """A value that is published slab by slab, to ``links`` in the transfers of these ``numbers`` with them."""

    window: Window
    value: torch.Tensor
    links: list[Link]
    numbers: dict[int, int]
    slabs: Slabs
    shown: int = 0

    def show(self, control: Control, device: int) -> None:
        """Publish the next slab, once it has a place."""
        step = self.shown = self.shown + 1
        if step == 1:
            self.window.become([(link.peer, link.left, self.numbers[link.peer] * COUNTED) for link in self.links])
        else:
            for link in self.links:
                control.wait(link.peer, link.left, (self.numbers[link.peer] - 1) * COUNTED + step - _SLOTS)
        box = self.slabs.box(step)
        copy(
            _slab(self.window.region, self.window.offset, step, self.slabs, box, self.value.dtype), cut(self.value, box)
        )
        for link in self.links:
            number = self.numbers[link.peer]
            control.words[link.entries + number % CREDIT * ENTRY] = (number - 1) * COUNTED + ANNOUNCED + step
        control.announce(device)


@dataclasses.dataclass(slots=True)
class Incoming:
    """What another device publishes slab by slab, and the parts of it that are ``wanted``: boxes, and where to copy them.

    Attributes:
        block: where all of it comes to be, None if it passes through a window at ``offset``.
    """

    link: Link
    number: int
    offset: int
    dtype: torch.dtype
    slabs: Slabs
    block: torch.Tensor | None = None
    wanted: list[tuple[Box, torch.Tensor]] = dataclasses.field(default_factory=list)

    def want(self, box: Box, target: torch.Tensor) -> None:
        """Have ``box`` copied to ``target``."""
        if len(box) != len(self.slabs.shape) or any(
            b > size for (_, b), size in zip(box, self.slabs.shape, strict=True)
        ):
            raise ValueError(
                f"device {self.link.peer} sends a tensor of shape {self.slabs.shape}, without the box {box}"
            )
        self.wanted.append((box, target))

    def read(self, control: Control, step: int) -> None:
        """Copy what is wanted of the slab of ``step``, once it is there."""
        at = self.link.arrivals + self.number % CREDIT * ENTRY
        control.wait(self.link.peer, at, (self.number - 1) * COUNTED + ANNOUNCED + step)
        box = self.slabs.box(step)
        if self.block is None:
            slab = _slab(self.link.region, self.offset, step, self.slabs, box, self.dtype)
        else:
            slab = cut(self.block, box)
        for wanted, target in self.wanted:
            both = common(box, wanted)
            if both is not None:
                copy(cut(target, within(both, wanted)), cut(slab, within(both, box)))


@dataclasses.dataclass(frozen=True, slots=True)
class Slabs:
    """How a tensor of ``shape`` is cut into boxes of up to ``elements``: runs along the first dim of whose slices that many fit."""

    shape: tuple[int, ...]
    elements: int

    @property
    def count(self) -> int:
        outer, _, runs = _cuts(self.shape, self.elements)
        return math.prod(outer) * runs

    def box(self, step: int) -> Box:
        """That of the ``step``-th slab; the first one is 1."""
        if not self.shape:
            return ()
        outer, rows, runs = _cuts(self.shape, self.elements)
        place, run = divmod(step - 1, runs)
        starts: list[int] = []
        for size in reversed(outer):
            place, index = divmod(place, size)
            starts.insert(0, index)
        split = self.shape[len(outer)]
        inner = self.shape[len(outer) + 1 :]
        return (
            *((i, i + 1) for i in starts),
            (run * rows, min((run + 1) * rows, split)),
            *((0, size) for size in inner),
        )


def step_through(
    control: Control,
    device: int,
    outgoing: Outgoing | None,
    incoming: Sequence[Incoming],
    links: Sequence[Link],
    numbers: dict[int, int],
) -> None:
    """Publish and read all slabs, in step with the others of the transfers of these ``numbers``, ``links`` with whom are given."""
    counts = [one.slabs.count for one in incoming]
    for step in range(1, max([outgoing.slabs.count if outgoing else 0, *counts]) + 1):
        if outgoing and step <= outgoing.slabs.count:
            outgoing.show(control, device)
        for one, count in zip(incoming, counts, strict=True):
            if step <= count:
                one.read(control, step)
        for link in links:
            control.words[link.leave] = (numbers[link.peer] - 1) * COUNTED + step
        control.announce(device)


def addends_of(transfer: Transfer, sources: dict[int, torch.Tensor | Incoming]) -> list[torch.Tensor]:
    """The terms of ``transfer``, which are complete when what they have `Incoming.want` is read."""
    return [_addend(transfer, term, sources) for term in transfer.terms]


def reduced(transfer: Transfer, addends: list[torch.Tensor]) -> torch.Tensor:
    """The result, of complete ``addends``."""
    if len(addends) == 1:
        return addends[0]
    return combine_all(transfer.reduce_op, addends, empty(addends[0].shape, transfer.dtype, addends[0].device))


def _addend(transfer: Transfer, term: tuple[Piece, ...], sources: dict[int, torch.Tensor | Incoming]) -> torch.Tensor:
    assert transfer.shape is not None
    result = empty(transfer.shape, transfer.dtype, torch.device("cpu"))
    if transfer.zeros:
        result.zero_()
    for piece in term:
        source, target = sources[piece.device], cut(result, piece.target)
        if isinstance(source, Incoming):
            source.want(piece.source, target)
        else:
            copy(target, cut(source, piece.source))
    return result


def common(one: Box, other: Box) -> Box | None:
    """What is in both boxes; None if there is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def slabs_of(value: torch.Tensor, slab_bytes: int) -> Slabs:
    """How ``value`` is cut."""
    slabs = Slabs(tuple(value.shape), slab_bytes // value.dtype.itemsize)
    if slabs.count > _MOST_SLABS:
        raise ValueError(
            f"a tensor of {value.nbytes} bytes is too large for slabs of {slab_bytes}: dtorch.init(arena_bytes=…) has to be larger"
        )
    return slabs


@functools.lru_cache(maxsize=1024)
def _cuts(shape: tuple[int, ...], elements: int) -> tuple[tuple[int, ...], int, int]:
    """The sizes of the dims before the one that is cut, how many of its slices a slab has, and how many slabs that makes of it."""
    for dim, size in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        if inner <= elements:
            rows = min(size, elements // inner)
            return shape[:dim], rows, -(-size // rows)
    return (), 0, 1  # of no dims; one element fits in any case


def _slab(region: Region, offset: int, step: int, slabs: Slabs, box: Box, dtype: torch.dtype) -> torch.Tensor:
    place = offset + step % _SLOTS * slabs.elements * dtype.itemsize
    return region.view(place, box_shape(box), dtype)


def within(box: Box, outer: Box) -> Box:
    """``box`` as a part of ``outer``."""
    return tuple((a - low, b - low) for (a, b), (low, _) in zip(box, outer, strict=True))
