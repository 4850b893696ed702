"""What one device's transfers with another need to know, and the entries by which it is told of them.

An entry: [how far, offset, poison's device or how it comes, poison's sequence number or elements of a part, number of dims, *shape].
"""

from __future__ import annotations

from array import array

import torch

from ..poison import Poison
from .arena import FIRST_DEVICE, Region
from .control import ENTRY, Control

HEADER = 5
MAX_DIMS = ENTRY - HEADER
#: The value lies at the offset.
WHOLE = -1
#: It grows at the offset, part by part.
GROWING = -3
#: There was no room: it comes slab by slab, through a window at the offset.
STREAMED = -2


class Link:
    """What one device's transfers with another need to know.

    Attributes:
        count: of the transfers that both take part in.
        arrivals: index of the other's ring of entries for this device.
        entries: index of this device's ring of entries for the other.
        leave: index of the word that says how far this device is with the other; ``left``, the other with this one.
        views: what the other has published before, by what its entry and the dtype were.
    """

    __slots__ = ("arrivals", "count", "entries", "leave", "left", "peer", "region", "views")

    def __init__(self, fd: int, control: Control, device: int, peer: int) -> None:
        self.peer = peer
        self.count = 0
        self.arrivals = control.entries(peer, device)
        self.entries = control.entries(device, peer)
        self.leave = control.departure(device, peer)
        self.left = control.departure(peer, device)
        self.region = Region(fd, FIRST_DEVICE + peer)
        self.views: dict[tuple, torch.Tensor] = {}


def shape_at(words: memoryview, at: int) -> tuple[int, ...] | Poison:
    """The shape that the entry at ``at`` tells of, or the poison."""
    if words[at + 2] >= 0:
        return Poison((words[at + 2], words[at + 3]))
    return tuple(words[at + HEADER : at + HEADER + words[at + 4]])


def poisoned(poison: Poison) -> array:
    """The entry of a failure, without how far."""
    return array("q", (0, *poison.origin, 0))


def sendable(value: torch.Tensor | None, device: int) -> torch.Tensor:
    """``value``, of which an entry can tell."""
    if value is None or value.ndim > MAX_DIMS:
        what = "nothing" if value is None else f"a tensor of {value.ndim} dims"
        raise ValueError(f"device {device} cannot send {what}; the limit is {MAX_DIMS} dims")
    return value
