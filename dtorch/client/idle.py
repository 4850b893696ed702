"""A thread that does something once Python has issued nothing for a while, and sleeps in the kernel until then.

A thread that woke now and then to look would ask for the GIL each time. An op gives the GIL up and takes it back at once, twice, and each
time it wakes whoever waits for it in vain: a look each millisecond cost an op a microsecond.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

_MONOTONIC, _CLOSE_ON_EXEC = 1, 0o2000000


class _Setting(ctypes.Structure):
    """``struct itimerspec``: the interval, of 0, and the time left."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every_s", "every_ns", "seconds", "nanoseconds"))


def seconds(count: float) -> Any:
    """A time for `IdleTimer.restart`."""
    return ctypes.byref(_Setting(0, 0, int(count), int(count % 1 * 1e9)))


_NOW = seconds(1e-9)


class IdleTimer:
    """Calls ``callback``, a method, in a thread of its own when the time of the last `restart` is over.

    It ends when the method returns False, or its object is gone: it keeps none alive.
    """

    def __init__(self, callback: Callable[[], bool]) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)  # it keeps the GIL
        self._set = libc.timerfd_settime
        self._fd = libc.timerfd_create(_MONOTONIC, _CLOSE_ON_EXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._callback = weakref.WeakMethod(callback)
        self._lock = threading.Lock()  # around the end of the descriptor
        threading.Thread(target=self._run, name="dtorch-idle", daemon=True).start()

    def restart(self, time: Any) -> None:
        """Count from now; ``time`` is from `seconds`."""
        self._set(self._fd, 0, time, None)

    def stop(self) -> None:
        """Have the callback called now, to return False."""
        with self._lock:
            if self._fd >= 0:
                self.restart(_NOW)

    def _run(self) -> None:
        going = True
        while going:
            os.read(self._fd, 8)
            callback = self._callback()
            going = callback is not None and callback()
            del callback
        with self._lock:
            os.close(self._fd)
            self._fd = -1
