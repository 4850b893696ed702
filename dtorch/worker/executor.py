"""One device's part of every command: its values, its meshes, its programs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch

from ..sharding.transfer import Transfer
from .poison import Poison

Value = torch.Tensor | Poison
Steps = Generator[tuple[Transfer, Value | None], Value | None, None]
"""What a command that communicates is: it yields ``(transfer, this device's local tensor)`` and is sent the transfer's result.

The tensor is None where the device holds no part of the source, a `Poison` where its part failed; the result is None where
the device gets no part (``transfer.shape is None``), a `Poison` where any source that it needs is one. It yields only
transfers whose group holds other devices; the order is the same on every member of a group.
"""


class Blobs(Protocol):
    """The client's bytes, as this device reaches them."""

    def blob(self, blob: Any) -> torch.Tensor:
        """The bytes of a PUT command's ``blob``: 1-d, uint8, the whole tensor, contiguous. The executor copies out of it."""

    def landing(self, landing: Any) -> torch.Tensor:
        """The space of a GET command's ``landing`` (never None): 1-d, uint8, writable, the whole tensor."""


class Executor:
    """Runs commands of `dtorch.engine.protocol` for one device.

    Args:
        device: the device's id.
        emit: takes every event (`dtorch.engine.protocol`: REPLY, FAILED, POISONED).
        blobs: resolves the blobs of PUT and the landings of GET.
    """

    def __init__(self, device: int, emit: Callable[[list], None], blobs: Blobs) -> None:
        raise NotImplementedError

    def run(self, command: list, sequence: int) -> Steps | None:
        """Run ``command``, the ``sequence``-th. None: it is done; else it communicates: drive what is returned to its end.

        Never raises for what a command does wrong: that poisons its outputs and emits FAILED.
        """
        raise NotImplementedError
