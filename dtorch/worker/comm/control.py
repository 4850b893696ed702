"""The control page: 64-bit words by which the client and the workers of one machine see how far the others are."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import time

_LINES = 64
_LINE = 8
_BELL = 1
_DOZING = 2
CREDIT = 16
"""Publications to one reader that may be waiting to be read, if they are small."""
LARGE_CREDIT = 4
"""The same of large ones: their memory is to be in the caches when it is written again."""
ENTRY = 32
"""Words that announce one publication."""
COUNTED = 1 << 20
"""What a transfer that is done adds to a word; less stands for as much of the one that is under way."""
ANNOUNCED = 1
"""So much of it stands for an entry that tells what is to come; each part of that adds one."""

NEVER = 1 << 62
CLIENT_DEVICE = -1
"""Who waits for the client as for a device: its line is the one before the first device's."""
SHOWN = _LINES - 4
"""The word that counts the slabs which the client has shown (`dtorch.worker.comm.ring`)."""
REST = _LINES - 3
"""The word that says from which of these slabs on they are in a block, not in the ring."""
_TAKEN = 3
# A wait looks for a while, and offers its core to others between looks: to a client, or to workers that are more than the cores. To sleep
# and to be woken takes longer than what is mostly waited for, with one process more than cores too (`python -m benchmarks collectives`).
_LOOKS = 20
_AWAKE_SECONDS = 300e-6
_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
# A sleeper looks again after these times: the bell's ringer reads a hint that may reach it too late, see `Control.announce`.
_NAP_SECONDS = (0.001, 0.002, 0.004, 0.008, 0.02)


class Control:
    """The words. Each has one writer, but for the hints of who sleeps.

    No store of a writer is seen by others before its earlier ones. That holds on x86 (TSO). On aarch64 a ``dmb ish`` must
    stand before each store that announces something, and after the load that notices it.

    In the file: the client's words; a line per device (progress, bell, hint, slabs taken); for each (reader, publisher) how far in their
    transfers the reader is; for each (publisher, reader) a ring of `CREDIT` entries. How far: `COUNTED` for each transfer.
    """

    def __init__(self, fd: int, devices: int) -> None:
        self._devices = devices
        self._departures = _LINES + _LINE * devices
        self._entries = self._departures + devices * devices
        size = 8 * (self._entries + devices * devices * CREDIT * ENTRY)
        self._memory = mmap.mmap(fd, size)
        self.words = memoryview(self._memory).cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        #: The number of commands each device has run.
        self.progress = self.words[_LINES : self._departures : _LINE]
        self._futex = _Futex()

    # Progress: workers tell, the client waits

    def ran(self, device: int, count: int) -> None:
        """``device`` has run ``count`` commands."""
        words = self.words
        words[_LINES + _LINE * device] = count
        if count >= words[0]:
            self._futex.wake(self._address + 8 * (_LINES + _LINE * device))

    def await_progress(self, device: int, target: int) -> None:
        """Sleep a moment, or until ``device`` has run more, but not if it has run ``target`` commands."""
        index = _LINES + _LINE * device
        seen = self.words[index]
        if seen < target:
            self._futex.wait(self._address + 8 * index, seen, -1)

    def wake_client_at(self, count: int | None) -> None:
        """Have workers wake the client when they have run ``count`` commands; None: never."""
        self.words[0] = NEVER if count is None else count

    # Bells: workers wait for each other

    def taken(self, device: int) -> int:
        """The index of the word that counts the client's slabs which ``device`` has read, or does not want."""
        return _LINES + _LINE * device + _TAKEN

    def departure(self, reader: int, publisher: int) -> int:
        """The index of the word that says how far ``reader`` is in its transfers with ``publisher``."""
        return self._departures + reader * self._devices + publisher

    def entries(self, publisher: int, reader: int) -> int:
        """The index of the first word of their ring of entries; ``count``'s entry stands at ``count % CREDIT * ENTRY`` in it.

        The first word of an entry says how far the publisher is.
        """
        return self._entries + (publisher * self._devices + reader) * CREDIT * ENTRY

    def announce(self, device: int) -> None:
        """Wake those who wait for something that ``device`` has just written."""
        words, line = self.words, _LINES + _LINE * device
        # Without a fence this load may miss a hint that is being set right now; then the sleeper's nap ends by itself.
        if words[line + _DOZING]:
            words[line + _DOZING] = 0
            words[line + _BELL] += 1
            self._futex.wake(self._address + 8 * (line + _BELL))

    def wait(
        self, device: int, index: int, value: int, deadline: float = math.inf, awake: float = _AWAKE_SECONDS
    ) -> bool:
        """Return once word ``index``, which ``device`` writes, is at least ``value``, or it is past ``deadline``; whether it is.

        For ``awake`` seconds it looks, then it sleeps.

        Workers have none: when one dies, the zygote ends all the others, the waiting ones too.
        """
        words = self.words
        asleep_at = 0.0
        while True:
            for _ in range(_LOOKS):
                if words[index] >= value:
                    return True
            now = time.perf_counter()
            if now > (asleep_at := asleep_at or now + awake):
                break
            if now > deadline:
                return False
            os.sched_yield()
        line = _LINES + _LINE * device
        nap = 0
        while True:
            words[line + _DOZING] = 1
            bell = words[line + _BELL]
            if words[index] >= value:
                return True
            if time.perf_counter() > deadline:
                return False
            self._futex.wait(self._address + 8 * (line + _BELL), bell, nap)
            nap = min(nap + 1, len(_NAP_SECONDS) - 1)


class _Futex:
    """Sleeping in the kernel on the low half of a shared word (little-endian). Releases the GIL; a signal interrupts it."""

    class _Timespec(ctypes.Structure):
        _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

    def __init__(self) -> None:
        self._call = ctypes.CDLL(None).syscall
        self._number = ctypes.c_long(_FUTEX[platform.machine()])
        self._naps = [ctypes.byref(self._Timespec(0, int(seconds * 1e9))) for seconds in _NAP_SECONDS]

    def wait(self, address: int, seen: int, nap: int) -> None:
        """Sleep until woken, for the ``nap``-th nap at most, and not at all if the word is no longer ``seen``."""
        self._call(
            self._number, ctypes.c_void_p(address), _FUTEX_WAIT, ctypes.c_uint32(seen & 0xFFFFFFFF), self._naps[nap]
        )

    def wake(self, address: int) -> None:
        self._call(self._number, ctypes.c_void_p(address), _FUTEX_WAKE, 0x7FFFFFFF, None)
