"""An all-reduce in shares: each member reduces its share of every chunk, and writes it into the blocks of all."""

from __future__ import annotations

import dataclasses
import functools
import math
from array import array
from collections.abc import Callable

import torch

from ... import memory_pool
from ...errors import WorkerLost
from ...sharding.pieces import Piece
from ...sharding.transfer import Transfer
from ..assemble import combine_all
from ..poison import Poison
from .board import Board
from .control import ANNOUNCED, COUNTED, CREDIT, ENTRY, Control
from .links import STREAMED, WHOLE, Link, poisoned, sendable
from .publications import Publications
from .streams import Window

# All-reduces of more bytes than this are made in shares, by two processes and by more: below, everybody adds up everything, which saves
# a wait, and is prepared (`python -m benchmarks collectives`).
_SHARED_OUT = (1 << 20, 1 << 18)
# Bytes of an all-reduce that are copied in at a time, and reduced while they are in the caches.
_CHUNK = 1 << 20

Chunk = tuple[int, int, int, int]
"""A chunk of an all-reduce: (start, start of this device's share, its end, end), in elements."""


class InShares:
    """One device's all-reduces in shares.

    Args:
        transfer: makes what there is no room for, in parts.
    """

    def __init__(
        self,
        control: Control,
        device: int,
        board: Board,
        sent: Publications,
        window: Window | None,
        transfer: Callable[[Transfer, torch.Tensor, int], torch.Tensor | Poison | None],
    ) -> None:
        self._control = control
        self._device = device
        self._board = board
        self._sent = sent
        self._window = window
        self._transfer = transfer

    def all_reduce(
        self, transfer: Transfer, links: list[Link], value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison:
        """The whole reduction, in a block of this device's arena.

        The n-th of n chunks is copied in while the others copy in theirs, but for this device's share of it: that is reduced
        out of ``value`` and the others' blocks, and written to all blocks. What `empty` made is such a block already.
        """
        control, shape = self._control, transfer.shape
        assert shape is not None
        chunks = _chunks_of(
            math.prod(shape), transfer.dtype.itemsize, transfer.sources.index(self._device), len(transfer.sources)
        )
        self._board.readers(links)
        entry = result = None
        there = ANNOUNCED
        try:
            if isinstance(value, Poison):
                entry = poisoned(value)
            else:
                value = sendable(value, self._device)
                if value.shape != shape:
                    raise ValueError(f"an addend of shape {tuple(value.shape)} where {shape} was planned")
                own = value.resolve_conj().resolve_neg().contiguous().view(-1)
                offset = self._sent.take(value)
                if offset is not None:
                    result, there = value, COUNTED - 1
                elif (made := self._sent.living(shape, transfer.dtype)) is not None:
                    offset, result = made
                    _fill(result.view(-1), own, chunks[0])
                    there = ANNOUNCED + 1
                entry = array("q", (offset or 0, STREAMED if result is None else WHOLE, 0, value.ndim, *shape))
        finally:
            self._board.show(links, entry or poisoned(Poison((self._device, sequence))), there)
        blocks: list[torch.Tensor] = []
        poisons = []
        has_room = True
        for device in transfer.sources:
            if device == self._device:
                if result is None and isinstance(value, torch.Tensor):
                    has_room = False
                    continue
                source = value if result is None else result
            else:
                link = self._board.links[device]
                at = link.arrivals + link.count % CREDIT * ENTRY
                control.wait(device, at, (link.count - 1) * COUNTED + ANNOUNCED)
                if control.words[at + 2] == STREAMED:
                    has_room = False
                    continue
                source = self._board.published_at(link, at, transfer.dtype)
            if isinstance(source, Poison):
                poisons.append(source)
            else:
                blocks.append(source.view(-1))
        if poisons:
            return poisons[0]
        if not has_room:  # as all have seen
            self._board.end(links)
            return self._in_parts(transfer, own, sequence)
        assert result is not None
        try:
            _reduce_shares(self._control, self._device, transfer, links, own, blocks, chunks)
        except Exception as error:  # the others' blocks are half written: there is no way on from here
            raise WorkerLost(f"an all-reduce of devices {transfer.group} failed: {error}") from error
        self._board.end(links)
        for link in links:
            control.wait(link.peer, link.left, link.count * COUNTED)
        return result

    def _in_parts(self, transfer: Transfer, own: torch.Tensor, sequence: int) -> torch.Tensor | Poison:
        """The whole reduction, where some arena has no room for a block of it: one little all-reduce after the other."""
        assert transfer.shape is not None
        assert self._window is not None
        count = math.prod(transfer.shape)
        size = self._window.slab_bytes // transfer.dtype.itemsize
        result = memory_pool.empty(transfer.shape, transfer.dtype)
        flat = result.view(-1)
        failed: Poison | Exception | None = None
        for start in range(0, count, size):
            stop = min(start + size, count)
            try:
                total = self._transfer(_part_of(transfer, stop - start), own[start:stop], sequence)
                if isinstance(total, torch.Tensor):
                    flat[start:stop].copy_(total)
                else:
                    failed = failed or total
            except WorkerLost:
                raise
            except Exception as error:  # the others go on with the next part
                failed = failed or error
        if isinstance(failed, Exception):
            raise failed
        return failed or result


def is_shared_out(transfer: Transfer) -> bool:
    """Whether an all-reduce is large enough for it."""
    assert transfer.shape is not None
    nbytes = math.prod(transfer.shape) * transfer.dtype.itemsize
    return nbytes > _SHARED_OUT[len(transfer.group) > 2]


def _reduce_shares(
    control: Control,
    device: int,
    transfer: Transfer,
    links: list[Link],
    own: torch.Tensor,
    blocks: list[torch.Tensor],
    chunks: tuple[Chunk, ...],
) -> None:
    """Reduce the shares of ``device`` in the ``blocks``, which are the members' in the order of the terms, and write them to all of those.

    What is not in its own block yet is copied in from ``own``, chunk by chunk, the first one excepted.
    """
    words = control.words
    rank = transfer.sources.index(device)
    mine, others = blocks[rank], [*blocks[:rank], *blocks[rank + 1 :]]
    in_place = own.data_ptr() == mine.data_ptr()
    for part, chunk in enumerate(chunks, ANNOUNCED + 1):
        if not in_place and part > ANNOUNCED + 1:
            _fill(mine, own, chunk)
            for link in links:
                words[link.entries + link.count % CREDIT * ENTRY] = (link.count - 1) * COUNTED + part
            control.announce(device)
        _, low, high, _ = chunk
        addends = [block[low:high] for block in blocks]
        addends[rank] = own[low:high]
        for link in links:
            control.wait(link.peer, link.arrivals + link.count % CREDIT * ENTRY, (link.count - 1) * COUNTED + part)
        total = combine_all(transfer.reduce_op, addends, mine[low:high])
        for other in others:
            other[low:high].copy_(total)


@functools.lru_cache(maxsize=1024)
def _chunks_of(count: int, itemsize: int, rank: int, members: int) -> tuple[Chunk, ...]:
    """How ``count`` elements are cut, and the share of the ``rank``-th member in each chunk."""
    step = max(1, _CHUNK // itemsize)
    edges = [(start, min(start + step, count)) for start in range(0, count, step)]
    return tuple((a, a + (b - a) * rank // members, a + (b - a) * (rank + 1) // members, b) for a, b in edges)


@functools.lru_cache(maxsize=1024)
def _part_of(transfer: Transfer, count: int) -> Transfer:
    """The same of ``count`` elements in a row, with nothing shared out."""
    box = ((0, count),)
    terms = tuple((Piece(device, box, box),) for device in transfer.sources)
    return dataclasses.replace(transfer, shape=(count,), terms=terms, is_all_reduce=False)


def _fill(block: torch.Tensor, own: torch.Tensor, chunk: Chunk) -> None:
    """Copy in what the others reduce."""
    start, low, high, stop = chunk
    if start < low:
        block[start:low].copy_(own[start:low])
    if high < stop:
        block[high:stop].copy_(own[high:stop])
