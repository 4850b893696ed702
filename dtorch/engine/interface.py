"""What the controller asks of an engine: real worker processes, or the in-process simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

EventHandler = Callable[[list], None]
"""Takes one worker event of `dtorch.engine.protocol`. Called from the engine's receiving thread, or from inside `Engine.send`."""
LostHandler = Callable[[Exception], None]
"""Takes the `WorkerLost` that ends the cluster; called once, from the engine's receiving thread."""


class Engine(Protocol):
    """A set of workers that all get the same commands in the same order."""

    def ensure(self, device_type: str, device_ids: Sequence[int]) -> None:
        """Start the workers these devices need; return when commands sent from now on will reach them.

        Workers that join later have missed earlier commands: the controller sends them the meshes and programs they need again.

        Raises:
            DeviceUnavailable: a device that does not exist here, or more workers than the limit.
        """

    def send(self, commands: list[list]) -> None:
        """Deliver one batch to every worker. Returns at once. The caller serialises calls."""

    def behind(self) -> int:
        """How many of the commands sent the slowest known worker has yet to run. Cheap: it is asked before every flush."""

    def wait_behind(self, limit: int) -> None:
        """Block (in the kernel) until `behind` is at most ``limit`` or the cluster is lost. Called without the controller's lock."""

    def workers(self) -> dict[int, tuple[int, int, str]]:
        """Of each running device: process id, commands sent that it has yet to run, and "running", "stopped" or "lost"."""

    def stage(self, tensor: torch.Tensor, devices: Sequence[int], send: Callable[[Any, bool], None]) -> None:
        """Bring a contiguous CPU tensor to ``devices``. May wait for space; called without the controller's lock.

        Args:
            devices: cpu devices, each of which wants a part of its own; none, if it is not so.
            send: queues a PUT command with this blob, for which it is good, and sends it if the second argument is true: the bytes follow.
        """

    def landing(self, nbytes: int) -> Any:
        """Space for a GET, as the command's ``landing``. Either `landed` or `release` follows."""

    def landed(self, landing: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """All replies have come: the landing's bytes as a contiguous tensor that shares memory with nobody."""

    def release(self, landing: Any) -> None:
        """The landing's GET has failed."""

    def close(self) -> None:
        """End every worker and remove every trace. Does not raise; may be called twice."""
