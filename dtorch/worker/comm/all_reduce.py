"""An all-reduce in shares: each member reduces its share of every chunk, and writes it into the blocks of all."""

from __future__ import annotations

import dataclasses
import functools

import torch

from ...sharding.pieces import Piece
from ...sharding.transfer import Transfer
from ..assemble import combine_all
from .control import ANNOUNCED, COUNTED, CREDIT, ENTRY, Control
from .links import Link

# Bytes of an all-reduce that are copied in at a time, and reduced while they are in the caches.
_CHUNK = 1 << 20

Chunk = tuple[int, int, int, int]
"""A chunk of an all-reduce: (start, start of this device's share, its end, end), in elements."""


def reduce_shares(
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
            fill(mine, own, chunk)
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
def chunks_of(count: int, itemsize: int, rank: int, members: int) -> tuple[Chunk, ...]:
    """How ``count`` elements are cut, and the share of the ``rank``-th member in each chunk."""
    step = max(1, _CHUNK // itemsize)
    edges = [(start, min(start + step, count)) for start in range(0, count, step)]
    return tuple((a, a + (b - a) * rank // members, a + (b - a) * (rank + 1) // members, b) for a, b in edges)


@functools.lru_cache(maxsize=1024)
def part_of(transfer: Transfer, count: int) -> Transfer:
    """The same of ``count`` elements in a row, with nothing shared out."""
    box = ((0, count),)
    terms = tuple((Piece(device, box, box),) for device in transfer.sources)
    return dataclasses.replace(transfer, shape=(count,), terms=terms, is_all_reduce=False)


def fill(block: torch.Tensor, own: torch.Tensor, chunk: Chunk) -> None:
    """Copy in what the others reduce."""
    start, low, high, stop = chunk
    if start < low:
        block[start:low].copy_(own[start:low])
    if high < stop:
        block[high:stop].copy_(own[high:stop])
