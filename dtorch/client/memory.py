"""What the workers hold."""

from __future__ import annotations

from typing import Any

import torch

from .. import hints
from ..engine import protocol
from ..mesh import DeviceMesh
from . import runtime
from .values import FREED


@hints.takes
def memory_stats(mesh: DeviceMesh | None = None, *, reset_peak: bool = False) -> dict[torch.device, dict[str, Any]]:
    """Live and peak bytes of tensors on each device, by device; waits until what was issued has run.

    Args:
        mesh: the devices asked about; all that are in use if left out.
        reset_peak: start the peak anew from what is live now.

    Returns:
        For each device ``{"live": bytes, "peak": bytes, "values": number of tensors}``.

    Example::

        >>> x = ones(1024, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
        >>> memory_stats(x.device_mesh)[torch.device("cpu", 1)]["live"] >= 512 * 4
        True
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"memory_stats(): argument 'mesh' must be a DeviceMesh, got {type(mesh).__name__}")
    if not isinstance(reset_peak, bool):
        raise TypeError(f"memory_stats(): argument 'reset_peak' must be bool, not {type(reset_peak).__name__}")
    controller = runtime.current()
    if controller is None:
        return {}
    controller = runtime.controller()
    with controller.lock:
        if FREED:  # what has died is freed first
            controller.drain()
    replies = controller.ask_all(protocol.STATS, reset_peak)
    wanted = runtime.devices() if mesh is None else [torch.device(mesh.device_type, i) for i in mesh.device_ids]
    return {device: replies[device.index] for device in wanted if device.index in replies}
