"""Memory for large tensors of our own making: that of those that died serves the next ones.

The system hands out cleared pages one by one at first touch, which costs more than what is done with them: a copy of 256 MB takes
35 ms, to fresh memory 200 ms (a virtual machine with 2 cores, `python -m benchmarks transfer`). libc maps each block of 32 MB or more
anew; told to keep them (``mallopt``), it finds no room for an aligned block where one of the same size was before (glibc 2.36).
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence

import torch

from .interrupts import critical

#: Tensors of fewer bytes are torch's own.
SMALLEST_BYTES = 1 << 20
#: Bytes of dead tensors' memory that a process keeps.
KEPT_BYTES = 1 << 29

_kept: dict[int, list[mmap.mmap]] = {}


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous cpu tensor whose values are anything."""
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if nbytes < SMALLEST_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    size = 1 << (nbytes - 1).bit_length()
    memory = _block(size)
    lease = leased(memory, 0, size, lambda: _keep(size, memory))
    return torch.frombuffer(lease, dtype=dtype, count=count).view(tuple(shape))


def give_back() -> None:
    """Return what is kept to the system."""
    _kept.clear()


def give_up(size: int) -> bool:
    """Return one block of ``size`` bytes to the system, if one is kept."""
    try:
        _kept[size].pop()
    except (KeyError, IndexError):
        return False
    return True


def leased(memory: mmap.mmap, offset: int, size: int, free: Callable[[], object]) -> ctypes.Array:
    """A buffer of some bytes that calls ``free`` when nothing refers to it any more, in whatever thread that is."""
    lease = _lease_of(size).from_buffer(memory, offset)
    lease.free = free  # type: ignore[attr-defined]
    return lease


def _block(size: int) -> mmap.mmap:
    try:
        return _kept[size].pop()
    except (KeyError, IndexError):
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory


def _keep(size: int, memory: mmap.mmap) -> None:
    # May run in any thread, even inside `_block`: single operations on dicts and lists are all it may rely on.
    if size + sum(one * len(blocks) for one, blocks in list(_kept.items())) <= KEPT_BYTES:
        _kept.setdefault(size, []).append(memory)


@functools.lru_cache(maxsize=64)  # sizes are powers of two
def _lease_of(size: int) -> type[ctypes.Array]:
    class Lease(ctypes.c_ubyte * size):  # type: ignore[misc]  # before Python 3.12 no class of ours can be a buffer but so
        @critical  # an interrupted finalizer would lose the block, and the Ctrl-C
        def __del__(self) -> None:
            self.free()

    return Lease
