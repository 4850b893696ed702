"""Receivers that only drain a channel: all in one process, so that they do not fight for the cores, and which imports no torch."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from dtorch.engine.channel import ClientChannel


@contextmanager
def drained(count: int) -> Iterator[ClientChannel]:
    """A channel with ``count`` receivers, which have subscribed."""
    from dtorch.engine.channel import ClientChannel

    with tempfile.TemporaryDirectory() as address:
        channel = ClientChannel(address)
        receivers = multiprocessing.get_context("spawn").Process(target=_drain, args=(address, count), daemon=True)
        receivers.start()
        try:
            for _ in range(count):
                if not channel.subscribed(60.0):
                    raise RuntimeError("a receiver did not subscribe")
            yield channel
        finally:
            receivers.kill()
            receivers.join()
            channel.close()


def _drain(address: str, count: int) -> None:
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    poller = zmq.Poller()
    for _ in range(count):
        socket = context.socket(zmq.SUB)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(f"ipc://{address}/commands")
        socket.subscribe(b"")
        poller.register(socket, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            socket.recv(copy=False)
