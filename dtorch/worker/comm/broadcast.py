"""A broadcast of a large value: what the others read of is its owner's result."""

from __future__ import annotations

import math
from array import array

import torch

from ...errors import WorkerLost
from ...sharding.layout import box_shape
from ...sharding.transfer import Transfer
from ..assemble import around
from .board import Board
from .control import ANNOUNCED, COUNTED, Control
from .links import GROWING, MAX_DIMS, WHOLE, Link
from .publications import Publications
from .streams import grow, growing

# Of so many bytes, read by one other and by more: of fewer the readers take longer than the copy that is saved.
_LEAST_BYTES = (1 << 24, 1 << 25)
# Results that may live in the arena when another is made there, so that a loop uses two blocks again and again. To touch new ones takes
# longer than the copy that is saved: shared memory has small pages.
_MOST_LIVING = 1


class Broadcasts:
    """One device's broadcasts of its own values."""

    def __init__(self, control: Control, device: int, board: Board, sent: Publications) -> None:
        self._control = control
        self._device = device
        self._board = board
        self._sent = sent
        # The offsets of results in blocks made for them. They may die in any thread.
        self._living: set[int] = set()

    def broadcast(self, transfer: Transfer, links: list[Link], value: torch.Tensor) -> torch.Tensor | None:
        """Let the others read ``value`` where this device's result is, and wait until they have; None if that has to be done otherwise.

        It waits because whoever gets a result may write to it.
        """
        if value.shape != transfer.shape or value.dtype is not transfer.dtype or value.ndim > MAX_DIMS:
            return None
        try:
            placed = self._place(value)
        except Exception:  # nothing is shown yet; what is done instead fails too, and says so
            return None
        if placed is None:
            return None
        offset, result = placed
        grows = result is not value
        self._board.readers(links)
        how, elements, part = (GROWING, growing(value).elements, ANNOUNCED) if grows else (WHOLE, 0, COUNTED)
        self._board.show(links, array("q", (offset, how, elements, value.ndim, *value.shape)), part)
        if grows:
            try:
                grow(self._control, self._device, links, result, value, around(value.shape, None))
            except Exception as error:  # the others read already: there is no way on from here
                raise WorkerLost(f"device {self._device} cannot send {tuple(value.shape)}: {error}") from error
        self._board.end(links)
        for link in links:
            self._control.wait(link.peer, link.left, link.count * COUNTED)
        return result

    def _place(self, value: torch.Tensor) -> tuple[int, torch.Tensor] | None:
        """Where the result is to be, and the tensor there: ``value`` itself if `Publications.empty` has made it."""
        offset = self._sent.take(value)
        if offset is not None:
            return offset, value
        if len(self._living) > _MOST_LIVING:
            return None
        made = self._sent.living(value.shape, value.dtype, self._living.discard)
        if made is not None:
            self._living.add(made[0])
        return made


def is_broadcast(transfer: Transfer) -> bool:
    """Whether the result is this device's own tensor as it is, a large one, and others read that too."""
    if not transfer.publishes or transfer.zeros or transfer.source_type != "cpu" or transfer.target_type != "cpu":
        return False
    if transfer.shape is None or len(transfer.terms) != 1 or len(transfer.terms[0]) != 1:
        return False
    (piece,) = transfer.terms[0]
    if piece.device != transfer.device or box_shape(piece.source) != transfer.shape:
        return False
    return math.prod(transfer.shape) * transfer.dtype.itemsize >= _LEAST_BYTES[len(transfer.group) > 2]
