"""Ctrl-C, held back while a command is half issued.

A KeyboardInterrupt between two steps of issuing would lose a command that is numbered already, or a write that its aliases have not
been told of; one inside an import of ours would leave a module half made for good. The signal handler looks at the frames it
interrupts: inside a `critical` function, or an import that dtorch makes, it comes again a moment later. That costs nothing while
nobody presses Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

#: Seconds until a held back Ctrl-C is tried again.
RETRY = 0.002

_critical: set[CodeType] = set()
_IMPORT = importlib._bootstrap._find_and_load.__code__  # type: ignore[attr-defined]
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def critical(function: Function) -> Function:
    """Hold Ctrl-C back while ``function`` runs. It must not wait for anything."""
    _critical.add(function.__code__)
    return function


def install() -> None:
    """Take Ctrl-C over from Python's own handler; a handler of the user's, and other threads, are left alone."""
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        signal.signal(signal.SIGINT, _handle)


def uninstall() -> None:
    """Give Ctrl-C back."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is _handle:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _handle(number: int, frame: FrameType | None) -> None:
    found, importing = frame, False
    while found is not None:
        importing = importing or found.f_code is _IMPORT
        if found.f_code in _critical or (importing and found.f_code.co_filename.startswith(_PACKAGE)):
            # A real signal: the main thread may be blocked in the kernel by then.
            again = threading.Timer(RETRY, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT])
            again.daemon = True
            again.start()
            return
        found = found.f_back
    signal.default_int_handler(number, frame)
