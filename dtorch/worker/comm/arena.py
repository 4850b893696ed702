"""Memory that the client and all its workers on one machine share.

One anonymous file (memfd: no name, no limit by ``/dev/shm``, gone with its last process), sparse and as large as it will ever
be, made by the client and inherited by every worker. It is cut into regions: the *control page*, whose 64-bit words say how
far everyone is, then one region for the client's bytes and one for each device's. Nobody needs to tell anybody about
growth: an owner uses more of its region, a reader maps more of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...memory_pool import leased

REGION = 1 << 40
"""Bytes of address space per region in the file; nothing is allocated before it is touched."""
CLIENT = 1
"""The client's region; device ``d``'s is ``FIRST_DEVICE + d``, and region 0 is the control page."""
FIRST_DEVICE = 2

_PAGE = 4096
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_PUNCH_HOLE = 3  # and keep the file's size
#: Bytes that are in memory twice while they become private.
_PRIVATE_STEP = 1 << 24
_FIRST_WINDOW = 1 << 30
_KEPT_VIEWS = 1024
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
#: Bytes of freed blocks whose memory stays.
KEPT_BYTES = 1 << 29


def create_segment(devices: int) -> int:
    """A new shared file for up to ``devices`` devices; its descriptor."""
    fd = os.memfd_create("dtorch", os.MFD_CLOEXEC)
    os.ftruncate(fd, (FIRST_DEVICE + devices) * REGION)
    return fd


def free_bytes() -> int:
    """The memory that shared files may still take, by what the system and this process's control group have left."""
    with open("/proc/meminfo") as text:
        free = next(int(line.split()[1]) << 10 for line in text if line.startswith("MemAvailable"))
    for limit, used in _GROUPS:
        with contextlib.suppress(OSError, ValueError):  # another version of control groups, none, or "max"
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return max(free, 0)


class _Calls:
    """What Python's mmap objects cannot do: anything at a given address, and holes without a mapping."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
        self._mmap, self._madvise, self._fallocate = libc.mmap, libc.madvise, libc.fallocate
        self._mmap.restype = address
        self._mmap.argtypes = [address, size, number, number, number, offset]
        self._madvise.argtypes = [address, size, number]
        self._fallocate.argtypes = [number, number, offset, offset]

    def map(self, address: int, nbytes: int, flags: int, fd: int, offset: int) -> bool:
        """Put this part of the file in the place of what is mapped at ``address``, for all threads at once; whether that was possible."""
        found = self._mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, fd, offset)
        return found == address

    def populate(self, address: int, nbytes: int) -> bool:
        """Give a private mapping pages of its own, as writes to them would; whether that was possible."""
        return self._madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Return the file's memory of these bytes to the system. Private pages stay."""
        self._fallocate(fd, _PUNCH_HOLE, offset, nbytes)


class Region:
    """A view of one region, mapped as far as anybody has looked."""

    def __init__(self, fd: int, index: int) -> None:
        self._fd = fd
        self._start = index * REGION
        self._window: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None
        self._mapped = 0
        self._views: dict[tuple, torch.Tensor] = {}

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of these bytes; it keeps its mapping alive."""
        end = offset + nbytes
        if end > self._mapped or self._bytes is None:
            self._map(end)
        return self._bytes[offset:end]  # type: ignore[index]

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of ``shape`` over the bytes at ``offset``. Kept for the next time: blocks are used again."""
        key = (offset, shape, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            found = self.bytes(offset, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
            self._views[key] = found
        return found

    def leased(self, offset: int, nbytes: int, free: Callable[[], object]) -> ctypes.Array:
        """A buffer of these bytes; it keeps its mapping alive, and calls ``free`` when it dies."""
        end = offset + nbytes
        if end > self._mapped:
            self._map(end)
        assert self._window is not None
        return leased(self._window, offset, nbytes, free)

    def give_up(self, offset: int, nbytes: int) -> None:
        """Return the memory of these bytes to the system; they read as zeros then."""
        if self._window is not None:
            self._window.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def make_private(self, memory: torch.Tensor, offset: int) -> bool:
        """Turn `bytes` at ``offset``, pages all of them, into memory that no other process sees, also after a fork.

        Other threads may use it meanwhile. False: it reads from the file still, where it was not written to. OSError: it is shared still.
        """
        calls, start = _calls(), self._start + offset
        address, nbytes = memory.data_ptr(), memory.nbytes
        if not calls.map(address, nbytes, mmap.MAP_PRIVATE, self._fd, start):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        for at in range(0, nbytes, _PRIVATE_STEP):
            step = min(_PRIVATE_STEP, nbytes - at)
            if not calls.populate(address + at, step):
                return False
            calls.punch(self._fd, start + at, step)
        return True

    def make_shared(self, memory: torch.Tensor, offset: int) -> bool:
        """Undo `make_private`; the bytes are zeros then. False: that was not possible."""
        return _calls().map(memory.data_ptr(), memory.nbytes, mmap.MAP_SHARED, self._fd, self._start + offset)

    def leave_only(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Return all memory of this and later regions to the system but these, ``(offset, bytes)`` in this one."""
        at = self._start
        for offset, nbytes in sorted(blocks):
            _calls().punch(self._fd, at, self._start + offset - at)
            at = self._start + offset + nbytes
        _calls().punch(self._fd, at, os.fstat(self._fd).st_size - at)

    def _map(self, end: int) -> None:
        size = max(_FIRST_WINDOW, 1 << (end - 1).bit_length())
        self._views.clear()
        self._window = mmap.mmap(self._fd, size, offset=self._start)
        self._bytes = torch.frombuffer(self._window, dtype=torch.uint8)
        self._mapped = size


class Arena:
    """Allocates blocks of a region that this process owns. Not thread-safe.

    Sizes are powers of two: what is not touched costs nothing, and a freed block, its pages there already, serves the next
    request of about its size. What is freed beyond `KEPT_BYTES` goes back to the system.

    Args:
        limit: the most bytes of all blocks together, those that are kept for the next request too; None: no limit.
    """

    def __init__(self, region: Region, limit: int | None = None) -> None:
        self.region = region
        self.limit = limit
        self._used = 0
        self._free: dict[int, list[int]] = {}
        self._sizes: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._given_up: set[int] = set()
        self._end = 0
        self._idle = 0

    def fits(self, nbytes: int, part: int = 1) -> bool:
        """Whether a block of ``nbytes`` is to be had, with no more than one ``part``-th of the limit in use then."""
        return self.limit is None or self._used + size_of(nbytes) <= self.limit // part

    def allocate(self, nbytes: int) -> int:
        """The offset of a block of at least ``nbytes``."""
        size = size_of(nbytes)
        if self.limit is not None:
            if self._used + size > self.limit:
                raise MemoryError(f"dtorch: no room for {nbytes} more bytes in an arena of {self.limit}")
            self._shrink(size)
        blocks = self._free.get(size)
        if blocks:
            offset = blocks.pop()
            if offset in self._given_up:
                self._given_up.remove(offset)
            else:
                self._idle -= size
        else:
            offset = self._end
            if offset + size > REGION:
                raise MemoryError(f"dtorch: no room for {nbytes} more bytes in shared memory")
            self._end += size
        self._sizes[offset] = size
        self._used += size
        return offset

    def _shrink(self, size: int) -> None:
        """Give up kept blocks of other sizes until ``size`` more bytes are within the limit."""
        assert self.limit is not None
        wanted = self._used + self._idle - self.limit + (0 if self._has_kept(size) else size)
        for other, blocks in self._free.items():
            while other != size and wanted > 0 and blocks and blocks[-1] not in self._given_up:
                offset = blocks.pop()
                self._give_up(offset, other, blocks)
                self._idle -= other
                wanted -= other

    def _has_kept(self, size: int) -> bool:
        return any(offset not in self._given_up for offset in self._free.get(size, ()))

    def tensor(
        self, shape: Sequence[int], dtype: torch.dtype, dies: Callable[[int], object] = lambda offset: None
    ) -> tuple[int, torch.Tensor]:
        """A contiguous tensor in a block of its own, and the block's offset.

        The block is freed when the tensor's storage dies, and ``dies`` called with its offset.
        """
        count = math.prod(shape)
        offset = self.allocate(count * dtype.itemsize)
        lease = self.region.leased(offset, self._sizes[offset], functools.partial(self._died, offset, dies))
        return offset, torch.frombuffer(lease, dtype=dtype, count=count).view(tuple(shape))

    def _died(self, offset: int, dies: Callable[[int], object]) -> None:
        dies(offset)
        self.free(offset)

    def share(self, offset: int) -> None:
        """One more `free` is needed for the block at ``offset``."""
        self._users[offset] = self._users.get(offset, 1) + 1

    def free(self, offset: int) -> None:
        """Take back the block at ``offset``."""
        users = self._users.pop(offset, 1)
        if users > 1:
            self._users[offset] = users - 1
            return
        size = self._sizes.pop(offset)
        self._used -= size
        blocks = self._free.setdefault(size, [])
        if self._idle + size <= KEPT_BYTES:
            blocks.append(offset)
            self._idle += size
        else:
            self._give_up(offset, size, blocks)

    def _give_up(self, offset: int, size: int, blocks: list[int]) -> None:
        """Return the memory of a free block, which is the last choice then."""
        self.region.give_up(offset, size)
        self._given_up.add(offset)
        blocks.insert(0, offset)


@functools.lru_cache(maxsize=1)
def _calls() -> _Calls:
    return _Calls()


def size_of(nbytes: int) -> int:
    """The bytes of the block that serves so many."""
    return max(_PAGE, 1 << (nbytes - 1).bit_length())
