"""The one cluster of this process, and the settings around it."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch

from .. import config as _config
from .. import hints
from ..errors import DTorchError, WorkerLost
from ..future import TensorFuture
from ..mesh import DeviceMesh
from .controller import Controller

log = logging.getLogger("dtorch")

#: Failed operations that are listed in the end, after the first.
LISTED = 10

_lock = threading.RLock()
_controller: Controller | None = None
_inherited: Controller | None = None
_shut_down = False
_default_mesh: DeviceMesh | None = None
#: Called when a cluster ends, to drop what was planned for it.
on_close: list[Any] = []


def controller() -> Controller:
    """The running cluster; starts one with the default settings if none was started yet.

    Raises:
        DTorchError: after `shutdown`, until `init` is called.
        WorkerLost: the cluster has lost a worker.
    """
    found = _controller
    if found is None:
        with _lock:
            if _controller is None:
                if _shut_down:
                    raise DTorchError("dtorch was shut down; call dtorch.init() to start a new cluster")
                _start(_config.from_environment())
            found = _controller
    assert found is not None
    return found


@hints.takes
def init(
    engine: str | None = None,
    *,
    devices: int | None = None,
    threads_per_worker: int | None = None,
    worker_imports: Sequence[str] | None = None,
    sync: bool | None = None,
    random: str | None = None,
    arena_bytes: int | None = None,
) -> None:
    """Start the cluster with settings of your own.

    Optional the first time, when the first tensor starts what it needs; after `shutdown` it must be called.

    Each setting may also come from the environment, as ``DTORCH_ENGINE`` and so on.

    Args:
        engine: ``"processes"`` (real workers, the default) or ``"simulate"`` (any number of virtual devices in this process).
        devices: the most worker processes to start (64).
        threads_per_worker: torch threads of each worker (1).
        worker_imports: modules that workers import, for custom ops registered with ``torch.library``.
        sync: wait after every op, so that an error is raised at the line that caused it.
        random: ``"torch"`` makes every random op bit-equal to single-device torch after the same seed, at the cost of
            generating whole tensors on the client; ``"counter"`` (default) gives the same values on every mesh.
        arena_bytes: the most bytes of shared memory that each worker process uses for what it lets other workers read, at least 65536;
            larger values pass through it piece by piece, which is slower (no limit but the machine's memory). Where there is less memory
            than that, a warning says so and the workers send over gloo.

    Raises:
        DTorchError: a cluster runs already.
        TypeError, ValueError: a setting that is not legal.

    Example::

        >>> shutdown()
        >>> init(engine="simulate", devices=8)
        >>> is_initialized()
        True
    """
    settings = _config.from_environment(
        engine=engine,
        devices=devices,
        threads_per_worker=threads_per_worker,
        worker_imports=worker_imports,
        sync=sync,
        random=random,
        arena_bytes=arena_bytes,
    )
    with _lock:
        if _controller is not None:
            raise DTorchError("dtorch is running already; call dtorch.shutdown() before dtorch.init()")
        _start(settings)


def _start(settings: _config.Config) -> None:
    global _controller, _shut_down
    _controller = Controller(settings)
    _shut_down = False


def shutdown() -> None:
    """End the cluster and every worker. May be called twice.

    Tensors made on it are gone, and a tensor made after it is an error until `init` starts a new cluster.

    Work that is still queued is dropped: `synchronize` first waits for it.
    """
    global _controller, _shut_down
    with _lock:
        found, _controller = _controller, None
        _shut_down = True
        if found is not None:
            unseen = found.failures.unseen()
            found.close()
            if unseen is not None:
                log.error("%s", _unread(found, found.failures.report(unseen)))
        for callback in on_close:
            callback()


def _in_child() -> None:
    """A forked process has no cluster: it starts one of its own when it needs one. Its parent's is kept, but left alone."""
    global _lock, _controller, _shut_down, _inherited
    _lock = threading.RLock()
    _inherited, _controller = _controller, None
    _shut_down = False
    for callback in on_close:
        callback()


os.register_at_fork(after_in_child=_in_child)


def is_initialized() -> bool:
    """Whether a cluster is running, and has all its workers."""
    return _controller is not None and _controller.lost is None


def synchronize() -> None:
    """Wait until everything issued so far has run.

    Raises:
        RemoteError: the first failure that no read has reported yet.
        WorkerLost: a worker died.

    Example::

        >>> x = ones(2, device_mesh=DeviceMesh("cpu", [0, 1])) / 3
        >>> synchronize()  # the division has run
    """
    if _controller is not None:
        controller().synchronize()


def synchronize_async() -> TensorFuture:
    """A future of None that is done when everything issued so far has run; it raises what `synchronize` would."""
    if _controller is not None:
        return controller().synchronize_async()
    future = TensorFuture()
    future._set()
    return future


def devices() -> list[torch.device]:
    """The devices in use so far, in order: those of every mesh that a tensor was made on.

    Example::

        >>> x = ones(2, device_mesh=DeviceMesh("cpu", [0, 1]))
        >>> devices()[:2]
        [device(type='cpu', index=0), device(type='cpu', index=1)]
    """
    found = [] if _controller is None else sorted(_controller.devices)
    return [torch.device(kind, index) for kind, index in found]


def get_default_mesh() -> DeviceMesh:
    """The mesh of tensors that name none: the one of `default_mesh`, else one CPU device."""
    return _default_mesh if _default_mesh is not None else DeviceMesh("cpu", [0])


def chosen_mesh() -> DeviceMesh | None:
    """The mesh of `default_mesh`, if one is in force."""
    return _default_mesh


def set_default_mesh(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """Set the default mesh; the one before."""
    global _default_mesh
    before, _default_mesh = _default_mesh, mesh
    return before


def current() -> Controller | None:
    return _controller


@atexit.register
def _at_exit() -> None:
    """End the workers; what went wrong and nobody has seen is printed and makes the exit status 1."""
    found = _controller
    if found is None:
        return
    told, error = found.loss_told, None
    try:
        if getattr(sys, "last_type", None) is not KeyboardInterrupt:  # who pressed Ctrl-C does not want to wait
            found.synchronize()
    except KeyboardInterrupt:
        _exit_with(128 + signal.SIGINT)
    except WorkerLost as exc:
        error = None if told else f"dtorch: {exc}"
    except BaseException as exc:
        error = _unread(found, exc)
    found.failures.count_as_seen()
    shutdown()
    if error is not None:
        print(error, file=sys.stderr)
        _exit_with(1)


def _unread(found: Controller, first: BaseException) -> str:
    """What to say in the end of a failure that nobody was told of, and of the others."""
    others = found.failures.all_unseen()
    text = f"dtorch: an operation failed and nothing read its result:\n{first}"
    if others:
        text += f"\nand {len(others)} more failed:\n" + "\n".join(failure.line for failure in others[:LISTED])
    return text + ("\n  …" if len(others) > LISTED else "")


def _exit_with(status: int) -> None:
    """Have this process exit with ``status`` though Python is exiting with another already; other exit handlers still run."""
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(ctypes.cast(libc._exit, ctypes.c_void_p), ctypes.c_void_p(status), None)
