"""When workers would do what a recording says was issued, were every op of a kind to take a given time: a discrete-event simulation."""

from __future__ import annotations

from collections.abc import Mapping

import dtorch


def makespan(recording: dtorch.Recording, seconds: Mapping[str, int]) -> int:
    """When the last device is done. Ops that are not named take no time.

    Each mesh runs what concerns it in the order of issue. What moves between meshes has left the first when that comes to it, and
    is waited for on the second.
    """
    free: dict[dtorch.DeviceMesh, int] = {}
    for op in recording.ops:
        source, *targets = op.meshes
        free[source] = free.get(source, 0) + seconds.get(op.name, 0)
        for mesh in targets:
            free[mesh] = max(free.get(mesh, 0), free[source])
    return max(free.values())
