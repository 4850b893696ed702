"""A worker keeps the memory that tensors have freed for the next ones, as accelerators' allocators do.

By default libc maps each block of 32 MB or more anew, and the system hands out cleared pages at every first touch: 64 MB + 64 MB of
floats took 94 ms where 16 ms are enough (a virtual machine with 2 cores). So large blocks come from the heap, too, and
what is free in it stays, up to a limit, until the worker has nothing to do for a moment.
"""

from __future__ import annotations

import ctypes

#: Free bytes in a worker's heap that stay there.
KEPT_BYTES = 1 << 30

# Of glibc's malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_MAX = -4
_FREE = 8  # fordblks, the bytes of free blocks


class _Info(ctypes.Structure):
    _fields_ = [("fields", ctypes.c_size_t * 10)]


_libc = ctypes.CDLL(None)
#: glibc 2.33 and later tells how much is free; without that nothing is kept, and these do nothing.
_info = getattr(_libc, "mallinfo2", None)
if _info is not None:
    _info.restype = _Info


def keep_freed() -> None:
    """From now on keep what is freed in this process."""
    if _info is not None:
        _libc.mallopt(_MMAP_MAX, 0)
        _libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def trim() -> None:
    """Give free memory back to the system if it is more than is to be kept."""
    if _info is not None and _info().fields[_FREE] > KEPT_BYTES:
        give_back()


def give_back() -> None:
    """Give all free memory back to the system."""
    if _info is not None:
        _libc.malloc_trim(0)
