"""TensorFuture: a value that is on its way from the workers."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from . import hints

log = logging.getLogger("dtorch")


def _seconds(timeout: Any) -> float | None:
    """``timeout`` as a legal wait; None is for ever."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not timeout >= 0:
        raise ValueError(f"timeout must be at least 0 seconds, got {timeout!r}")
    return min(timeout, threading.TIMEOUT_MAX)


class TensorFuture:
    """The value of a distributed tensor at the point of the program where it was asked for.

    Callbacks run in one dispatcher thread; ``await`` resumes in the loop it was awaited in.

    Example::

        >>> future = ones(3).to_torch_async()
        >>> future.get(timeout=60)
        tensor([1., 1., 1.])
    """

    __slots__ = ("_lock", "_done", "_value", "_error", "_callbacks", "_finish")

    def __init__(self, finish: Callable[[Any], Any] | None = None) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[TensorFuture], Any]] = []
        self._finish = finish

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TimeoutError: it did not come in time; the future is still good.
            RemoteError, WorkerLost: what prevented the value.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"the value did not arrive within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value

    result = get

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the value or its error is here; False if ``timeout`` seconds pass first."""
        return self._done.wait(_seconds(timeout))

    def done(self) -> bool:
        """Whether the value or its error is here."""
        return self._done.is_set()

    is_ready = done

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error instead of raising it; None if the value came."""
        if not self.wait(timeout):
            raise TimeoutError(f"the value did not arrive within {timeout} s")
        return self._error

    def add_done_callback(self, callback: Callable[[TensorFuture], Any]) -> None:
        """Call ``callback(self)`` in the dispatcher thread once done; what it raises is logged."""
        if not callable(callback):
            raise TypeError(f"add_done_callback(): expected a callable, got {callback!r}")
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        _DISPATCHER.submit(callback, self)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake(_: TensorFuture) -> None:
            try:
                loop.call_soon_threadsafe(settle)
            except RuntimeError:
                log.debug("the event loop closed before an awaited value arrived")

        self.add_done_callback(wake)
        yield from waiter
        return self.get()

    def _set(self, value: Any = None, error: BaseException | None = None) -> None:
        """Complete it; the first call counts. May be called in any thread."""
        with self._lock:
            if self._done.is_set():
                return
            if error is None and self._finish is not None:
                try:
                    value = self._finish(value)
                except BaseException as exc:  # it belongs to whoever reads the value
                    error = exc
            self._value, self._error, self._finish = value, error, None
            callbacks, self._callbacks = self._callbacks, []
            self._done.set()
        for callback in callbacks:
            _DISPATCHER.submit(callback, self)

    def __repr__(self) -> str:
        state = "pending" if not self.done() else "failed" if self._error is not None else "ready"
        return f"TensorFuture({state})"


class _Dispatcher:
    """The one thread that runs callbacks, so that they neither block the receiving thread nor race each other."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable, TensorFuture]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, callback: Callable[[TensorFuture], Any], future: TensorFuture) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="dtorch-callbacks", daemon=True)
                self._thread.start()
        self._queue.put((callback, future))

    def _run(self) -> None:
        while True:
            callback, future = self._queue.get()
            try:
                callback(future)
            except BaseException:  # SystemExit too: a callback must not end this thread
                log.exception("a TensorFuture callback raised")
            del callback, future


_DISPATCHER = _Dispatcher()


@hints.takes
def as_completed(futures: Iterable[TensorFuture], timeout: float | None = None) -> Iterator[TensorFuture]:
    """Iterate over futures as they finish, failed ones too.

    Args:
        timeout: seconds from now until the last one must be done; None waits as long as it takes.

    Raises:
        TimeoutError: while iterating: not all were done in time.
        TypeError, ValueError: something that is no `TensorFuture`; a timeout that is no number of seconds.

    Example::

        >>> futures = [ones(n).sum().to_torch_async() for n in (1, 2)]
        >>> sorted(future.get().item() for future in as_completed(futures))
        [1.0, 2.0]
    """
    if isinstance(futures, TensorFuture) or not isinstance(futures, Iterable):
        raise TypeError(f"as_completed(): argument 'futures' must be an iterable of TensorFuture, got {futures!r}")
    pending = list(futures)
    for future in pending:
        if not isinstance(future, TensorFuture):
            raise TypeError(f"as_completed(): argument 'futures' must hold TensorFutures, got {future!r}")
    seconds = _seconds(timeout)
    deadline = None if seconds is None else time.monotonic() + seconds
    arrived: queue.SimpleQueue[TensorFuture] = queue.SimpleQueue()
    for future in pending:
        future.add_done_callback(arrived.put)
    return _in_order(arrived, len(pending), deadline, timeout)


def _in_order(
    arrived: queue.SimpleQueue[TensorFuture], count: int, deadline: float | None, timeout: float | None
) -> Iterator[TensorFuture]:
    for _ in range(count):
        try:
            yield arrived.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0))
        except queue.Empty:
            raise TimeoutError(f"not every value arrived within {timeout} s") from None
