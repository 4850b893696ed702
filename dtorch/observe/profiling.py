"""`profile`: one trace of the client and all workers."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .. import hints
from ..client import runtime
from ..errors import DTorchError
from . import trace
from .timing import Timing

log = logging.getLogger("dtorch")

#: Calls of the client, and commands, that a profile keeps; a worker keeps as many notes (`dtorch.worker.tracing.LIMIT`).
LIMIT = 1 << 18

_running = threading.Lock()


@hints.takes
@contextmanager
def profile(path: str | os.PathLike[str]) -> Iterator[None]:
    """Trace what runs within, and write it to ``path`` in the end: open it in https://ui.perfetto.dev or chrome://tracing.

    The client has a track for each thread: every op while it is dispatched, with the user's line, what it sends, and every wait for a
    value. Each worker has one: every command that it runs and, inside, what it exchanges with others (all-reduce, all-gather, shift, …,
    with bytes and mesh axes), waiting included. Arrows lead from an op's issue to its runs. All are on one clock, CLOCK_MONOTONIC, in
    microseconds since the profile began.

    The file is written also if the block raises, and replaces ``path`` only when it is complete. The end waits for all that was issued.
    On a cuda device that is the launch of kernels, not their end. What is kept is bounded, by some hundred thousand ops: what comes after
    is left out, with a warning. Without a profile nothing is slower by it.

    Args:
        path: of the file; its folder is made if need be.

    Raises:
        TypeError, OSError: ``path`` is no path, or cannot be written: before the block runs.
        DTorchError: another profile is being taken, or dtorch was shut down.

    Example::

        >>> x = ones(4, 6, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(1)])
        >>> file = os.path.join(tempfile.mkdtemp(), "trace.json")
        >>> with profile(file):
        ...     print(x.softmax(1).sum().item())
        4.0
        >>> "all_gather" in open(file).read()
        True
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"profile(): argument 'path' must be a path, not {type(path).__name__}")
    if not os.fspath(path) or os.path.isdir(path):
        raise IsADirectoryError(f"profile(): {os.fspath(path)!r} is a folder; name the file to write")
    if not _running.acquire(blocking=False):
        raise DTorchError("profile(): another profile is being taken; they do not nest")
    try:
        yield from _profile(path)
    finally:
        _running.release()


def _profile(path: str | os.PathLike[str]) -> Iterator[None]:
    from ..io.atomic import replacing_file  # the first use of dtorch.io, which most scripts do without

    raised = None
    runtime.controller()
    with replacing_file(path) as partial, open(partial, "w") as file:
        timing = Timing(LIMIT, parts=True)
        timing.start()
        try:
            yield
        except BaseException as error:  # what led to it is worth seeing
            raised = error
        try:
            controller = runtime.current()
            if controller is not None and controller.devices:
                controller.mark().get()  # the clocks are compared when the workers have nothing else to do
        except DTorchError:
            pass  # `runs` will have none
        finally:
            timing.stop()
        runs = timing.runs()
        if timing.issues and runs.controller is None:
            log.warning("the profile has the client's part only: the cluster ended before the workers' notes came")
        if timing.left_out or runs.left_out:
            log.warning(
                "the profile is full: %d entries of the client and %d of workers are left out",
                timing.left_out,
                runs.left_out,
            )
        trace.write(file, timing, runs)
    if raised is not None:
        raise raised
