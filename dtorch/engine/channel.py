"""The channel: batches of commands from the client to every worker, events from the workers to the client.

The only module that knows ZeroMQ. A batch is ``[number, commands]``, a message of events ``[event, …]``, both msgpack: nothing
from a peer is ever unpickled. The publishing socket has no high-water mark, because one that has drops what exceeds it; how
far the client may run ahead is the engine's business. Batches are numbered from 0, so that a loss would be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from ..errors import DTorchError, WorkerLost

#: How long a worker gets nothing before it counts as idle.
_IDLE_MILLISECONDS = 500
#: Messages of fewer bytes are copied at once: to lend the memory costs a fifth more (pyzmq 27, which copies such messages either way).
_COPIED = 1 << 16
_decode = msgspec.msgpack.Decoder().decode


def _endpoints(scheme: str, address: str) -> tuple[str, str]:
    if scheme != "ipc":
        raise DTorchError(f"dtorch reaches workers on this machine only (ipc); {scheme!r} channels are not there yet")
    return f"ipc://{address}/commands", f"ipc://{address}/events"


def _open(context: zmq.Context, kind: int) -> zmq.Socket:
    opened = context.socket(kind)
    opened.set(zmq.LINGER, 0)
    opened.set(zmq.SNDHWM, 0)
    opened.set(zmq.RCVHWM, 0)
    return opened


def _number(value: object) -> object:
    """The Python number that a numpy scalar is: torch takes those as numbers, msgpack does not."""
    if type(value).__module__ == "numpy":
        return value.item()  # type: ignore[attr-defined]
    raise TypeError(f"a command cannot hold a {type(value).__name__}")


class ClientChannel:
    """The client's end.

    Args:
        address: for ``ipc``, a directory that only this user can enter.
    """

    def __init__(self, address: str, scheme: str = "ipc") -> None:
        commands, events = _endpoints(scheme, address)
        self._encode = msgspec.msgpack.Encoder(enc_hook=_number).encode
        self._context = zmq.Context()
        self._commands = _open(self._context, zmq.XPUB)
        self._commands.set(zmq.XPUB_VERBOSE, 1)  # tell of every subscription, not only of the first
        self._events = _open(self._context, zmq.PULL)
        for bound, endpoint in ((self._commands, commands), (self._events, events)):
            try:
                bound.bind(endpoint)
            except zmq.ZMQError as error:
                self.close()
                raise DTorchError(f"the socket {endpoint} cannot be opened: {error.strerror}") from None

    def subscribed(self, seconds: float) -> bool:
        """Whether one more worker subscribes within ``seconds``: what is sent from then on will reach it."""
        if not self._commands.poll(int(seconds * 1000)):
            return False
        self._commands.recv()
        return True

    def send(self, number: int, commands: list[list]) -> None:
        """Send a batch. Calls must not overlap."""
        body = self._encode([number, commands])
        self._commands.send(body, copy=len(body) < _COPIED)

    def wait(self, fds: Iterable[int], seconds: float) -> set[int]:
        """Sleep until there are events, or something to read from one of ``fds``; which of those. For one thread only."""
        poller = zmq.Poller()
        poller.register(self._events, zmq.POLLIN)
        for fd in fds:
            poller.register(fd, zmq.POLLIN)
        return {source for source, _ in poller.poll(int(seconds * 1000)) if isinstance(source, int)}

    def receive(self) -> list[list]:
        """The events of one message, or none if there is no message now. For one thread only."""
        try:
            return _decode(self._events.recv(zmq.NOBLOCK, copy=False).buffer)
        except zmq.Again:
            return []

    def close(self) -> None:
        self._context.destroy(linger=0)


class WorkerChannel:
    """A worker's end.

    Args:
        number: of the first batch that it will get.
    """

    def __init__(self, address: str, number: int, scheme: str = "ipc") -> None:
        commands, events = _endpoints(scheme, address)
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = number
        context = zmq.Context()
        self._events = _open(context, zmq.PUSH)
        self._events.connect(events)
        self._commands = _open(context, zmq.SUB)
        self._commands.connect(commands)
        self._commands.subscribe(b"")
        self._commands.rcvtimeo = _IDLE_MILLISECONDS

    def receive(self, idle: Callable[[], None] = lambda: None) -> list[list]:
        """Block until a batch comes, and return its commands. ``idle`` is called once when none has come for a while."""
        try:
            message = self._commands.recv(copy=False)
        except zmq.Again:
            idle()
            self._commands.rcvtimeo = -1
            message = self._commands.recv(copy=False)
            self._commands.rcvtimeo = _IDLE_MILLISECONDS
        number, commands = _decode(message.buffer)
        if number != self._number:
            raise WorkerLost(f"lost commands: expected batch {self._number}, got {number}")
        self._number += 1
        return commands

    def send(self, events: list[list[Any]]) -> None:
        self._events.send(self._encode(events), copy=False)
