"""Two models on disjoint meshes, driven by one thread: both at once, over one after the other.

Each is a chain of products on one worker. One after the other means that Python waits for the first before it issues the second.
"""

from __future__ import annotations

import torch

import dtorch

from .measure import Row, ratio, rounds, row

SIZE, LAYERS = 768, 12


def run() -> list[Row]:
    torch.set_num_threads(1)
    meshes = [dtorch.DeviceMesh("cpu", [device]) for device in (0, 1)]
    with torch.no_grad():
        models = [
            dtorch.distribute_module(torch.nn.Sequential(*[torch.nn.Linear(SIZE, SIZE) for _ in range(LAYERS)]), mesh)
            for mesh in meshes
        ]
        inputs = [dtorch.randn(SIZE, SIZE, device_mesh=mesh) for mesh in meshes]

        def together() -> None:
            for model, x in zip(models, inputs, strict=True):
                model(x)
            dtorch.synchronize()

        def in_turn() -> None:
            for model, x in zip(models, inputs, strict=True):
                model(x)
                dtorch.synchronize()

        seconds = rounds({"both at once": together, "one after the other": in_turn}, calls=1)
    dtorch.shutdown()
    rows = [row(name, times, 1e3, "ms") for name, times in seconds.items()]
    rows.append(ratio("at once over in turn", seconds["both at once"], seconds["one after the other"], "at most 0.65"))
    return rows
