"""What a device shows to each of the others, and what they show it: entries of the control page, by number.

Two devices number the transfers they both take part in, each for itself: commands come to all in one order, so they agree.
"""

from __future__ import annotations

from array import array

import torch

from ..poison import Poison
from .control import ANNOUNCED, COUNTED, CREDIT, ENTRY, LARGE_CREDIT, Control
from .links import GROWING, HEADER, STREAMED, Link, shape_at
from .publications import Reader
from .streams import Incoming, Slabs

_KEPT_VIEWS = 1024


class Board:
    """One device's.

    Args:
        fd: the segment.

    Attributes:
        links: with the others, by their numbers, as far as there has been a transfer with them.
    """

    def __init__(self, fd: int, control: Control, device: int) -> None:
        self._fd = fd
        self._control = control
        self._device = device
        self.links: dict[int, Link] = {}
        self._groups: dict[tuple[int, ...], list[Link]] = {}

    def begin(self, group: tuple[int, ...]) -> list[Link]:
        """Number the transfer with each of the others in its group."""
        links = self._groups.get(group)
        if links is None:
            links = self._groups[group] = [self._link(peer) for peer in group if peer != self._device]
        for link in links:
            link.count += 1
        return links

    def end(self, links: list[Link]) -> None:
        """Nothing more will be read in this transfer, be it done or failed."""
        words = self._control.words
        for link in links:
            words[link.leave] = link.count * COUNTED
        self._control.announce(self._device)

    def leave(self, numbers: dict[int, int]) -> None:
        """Nothing more will be read in the transfers of these numbers."""
        for peer, number in numbers.items():
            self._control.words[self.links[peer].leave] = number * COUNTED
        self._control.announce(self._device)

    def readers(self, links: list[Link]) -> list[Reader]:
        """The others, once they are all within the credit."""
        control = self._control
        for link in links:
            control.wait(link.peer, link.left, (link.count - LARGE_CREDIT) * COUNTED)
        return [(link.peer, link.left, link.count * COUNTED) for link in links]

    def show(self, links: list[Link], entry: array, part: int = COUNTED) -> None:
        """Show ``entry``; of what it tells of, as much is there as ``part`` says."""
        control, words = self._control, self._control.words
        size = len(entry)
        for link in links:
            at = link.entries + link.count % CREDIT * ENTRY
            words[at + 1 : at + 1 + size] = entry
            words[at] = (link.count - 1) * COUNTED + part
        control.announce(self._device)

    def read(
        self, link: Link, dtype: torch.dtype, number: int, while_it_grows: bool
    ) -> torch.Tensor | Poison | Incoming:
        """What the other has published for the ``number``-th transfer with it, in its own memory."""
        at = link.arrivals + number % CREDIT * ENTRY
        self._control.wait(link.peer, at, (number - 1) * COUNTED + ANNOUNCED)
        comes = self._control.words[at + 2]
        if comes == STREAMED or (comes == GROWING and while_it_grows):
            return self._incoming(link, at, dtype, number)
        if comes == GROWING:
            slabs = self._incoming(link, at, dtype, number).slabs
            self._control.wait(link.peer, at, (number - 1) * COUNTED + ANNOUNCED + slabs.count)
        return self.published_at(link, at, dtype)

    def published_at(self, link: Link, at: int, dtype: torch.dtype) -> torch.Tensor | Poison:
        """What the entry at ``at`` tells of."""
        words = self._control.words
        if words[at + 2] >= 0:
            return shape_at(words, at)  # type: ignore[return-value]
        shape = words[at + HEADER : at + HEADER + words[at + 4]]
        key = words[at + 1], shape.tobytes(), dtype
        view = link.views.get(key)
        if view is None:
            if len(link.views) >= _KEPT_VIEWS:
                link.views.clear()
            view = link.views[key] = link.region.view(words[at + 1], tuple(shape), dtype)
        return view

    def whole_at(self, link: Link, at: int, dtype: torch.dtype) -> torch.Tensor | Poison | None:
        """`_published_at`, None for what comes slab by slab."""
        return None if self._control.words[at + 2] in (STREAMED, GROWING) else self.published_at(link, at, dtype)

    def _incoming(self, link: Link, at: int, dtype: torch.dtype, number: int) -> Incoming:
        words = self._control.words
        shape = shape_at(words, at)
        assert not isinstance(shape, Poison)
        block = link.region.view(words[at + 1], shape, dtype) if words[at + 2] == GROWING else None
        return Incoming(link, number, words[at + 1], dtype, Slabs(shape, words[at + 3]), block)

    def _link(self, peer: int) -> Link:
        found = self.links.get(peer)
        if found is None:
            found = self.links[peer] = Link(self._fd, self._control, self._device, peer)
        return found
