"""What one device has in its arena: blocks that others have yet to read, and tensors that were made there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ... import memory_pool
from .arena import Arena
from .control import Control

_WAITING_BYTES = 1 << 28
#: The part of a limited arena, one n-th, that tensors which live on in it may take: the rest is for what passes through.
_LIVING = 2

Reader = tuple[int, int, int]
"""A reader of a publication: (device, index of its departure word, what stands there once it has read)."""


class Publications:
    """The blocks of one device's arena, and who has yet to read them."""

    def __init__(self, arena: Arena, control: Control) -> None:
        self.arena = arena
        self._control = control
        #: What others have yet to read: (offset, bytes, readers).
        self.waiting: list[tuple[int, int, list[Reader]]] = []
        # Tensors that `empty` has made and nothing has been done with: their offsets, by where they are in memory.
        self._made_here: dict[int, int] = {}

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in a block; where there is no room for it, in memory of this process."""

        def forget(offset: int) -> None:
            self._made_here.pop(place, None)

        made = self.living(shape, dtype, forget)
        if made is None:
            return memory_pool.empty(shape, dtype)
        offset, tensor = made
        place = tensor.data_ptr()
        self._made_here[place] = offset
        return tensor

    def living(
        self, shape: Sequence[int], dtype: torch.dtype, dies: Callable[[int], object] = lambda offset: None
    ) -> tuple[int, torch.Tensor] | None:
        """`Arena.tensor`, None if there is no room for it."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self.arena.fits(nbytes, _LIVING):
            self.free_read()
            if not self.arena.fits(nbytes, _LIVING):
                return None
        return self.arena.tensor(shape, dtype, dies)

    def is_made_here(self, value: torch.Tensor) -> bool:
        """Whether `empty` has made the memory of ``value``."""
        return bool(self._made_here) and value.data_ptr() in self._made_here

    def take(self, value: torch.Tensor) -> int | None:
        """Where in the arena ``value`` is, if `empty` has made it; from now on it did not."""
        if not self.is_made_here(value):
            return None
        if not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes:
            return None
        if value.is_conj() or value.is_neg():  # its memory holds other values
            return None
        return self._made_here.pop(value.data_ptr())

    def place(
        self, value: torch.Tensor, readers: list[Reader], may_wait: bool
    ) -> tuple[int, torch.Tensor | None] | None:
        """Where ``value`` is to be read, and the tensor there that it has yet to be copied to; None if there is no room.

        It is freed when all have read it. ``may_wait``: for earlier ones to be read.
        """
        nbytes = value.nbytes
        if not nbytes:
            return 0, None
        waiting = self.free_read()
        if may_wait:
            while self.waiting and waiting + nbytes > _WAITING_BYTES:
                waiting -= self.waiting[0][1]
                self.await_readers(1)
        made_here = self.take(value)
        if made_here is not None:
            self.arena.share(made_here)
            self.waiting.append((made_here, nbytes, readers))
            return made_here, None
        if not self.arena.fits(nbytes) and not self._make_room(nbytes, may_wait):
            return None
        offset = self.arena.allocate(nbytes)
        self.waiting.append((offset, nbytes, readers))  # also if copying fails: its readers depart all the same
        return offset, self.arena.region.view(offset, tuple(value.shape), value.dtype)

    def _make_room(self, nbytes: int, may_wait: bool) -> bool:
        assert self.arena.limit is not None
        while may_wait and self.waiting and nbytes <= self.arena.limit // _LIVING and not self.arena.fits(nbytes):
            self.await_readers(1)
        return self.arena.fits(nbytes)

    def free_read(self) -> int:
        """Free what has been read; the bytes that have not."""
        words, waiting = self._control.words, 0
        still: list[tuple[int, int, list[Reader]]] = []
        for block in self.waiting:
            for _, word, done in block[2]:
                if words[word] < done:
                    still.append(block)
                    waiting += block[1]
                    break
            else:
                self.arena.free(block[0])
        self.waiting = still
        return waiting

    def await_readers(self, count: int) -> None:
        """Wait until the ``count`` oldest publications have been read, and free them."""
        for _ in range(count):
            offset, _, readers = self.waiting.pop(0)
            for peer, word, done in readers:
                self._control.wait(peer, word, done)
            self.arena.free(offset)
