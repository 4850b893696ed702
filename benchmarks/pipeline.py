"""A training step of two stages on a worker each: eight micro-batches in 1F1B's order, and one micro-batch at a time, waited for.

On paper 1F1B takes (8 + 2 - 1) / (8 × 2) of the time: 1.78 × faster. Products need a free core for each worker to show it; layers that
sleep on the worker (20 ms forward, 40 ms backward) show it on any machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import dtorch
from dtorch import nn, pipeline

from .measure import Row, ratio, rounds, row
from .naps import Nap

WIDTH, ROWS, LAYERS, MICRO_BATCHES = 512, 256, 4, 8


def run() -> list[Row]:
    torch.set_num_threads(1)
    dtorch.init(worker_imports=["benchmarks.naps"])
    rows = []
    for what, layers, repeat in (
        ("products", lambda: [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], 15),
        ("naps", lambda: [nn.Linear(WIDTH, WIDTH), Nap()], 3),
    ):
        seconds = rounds(_contestants(layers), calls=1, repeat=repeat)
        rows += [row(f"{what}, {name}", times, 1e3, "ms") for name, times in seconds.items()]
        rows.append(ratio(f"{what}, one at a time over 1F1B", *seconds.values(), "at least 1.5"))
    dtorch.shutdown()
    return rows


def _contestants(layers: Callable[[], list[nn.Module]]) -> dict[str, Callable[[], object]]:
    meshes = dtorch.init_device_mesh("cpu", 2, ("pp",)).unbind("pp")
    stages = []
    for mesh in meshes:
        with dtorch.default_mesh(mesh):
            stages.append(nn.Sequential(*layers()))
    xs = [dtorch.rand(ROWS, WIDTH, device_mesh=meshes[0]) for _ in range(MICRO_BATCHES)]
    ys = [dtorch.rand(ROWS, WIDTH, device_mesh=meshes[1]) for _ in range(MICRO_BATCHES)]

    def step(schedule: list[pipeline.Step], numbers: range) -> None:
        pipeline.run(schedule, stages, [xs[i] for i in numbers], [ys[i] for i in numbers], nn.functional.mse_loss)
        dtorch.synchronize()

    together, alone = list(pipeline.one_f_one_b(2, MICRO_BATCHES)), list(pipeline.one_f_one_b(2, 1))

    def one_at_a_time() -> None:
        for i in range(MICRO_BATCHES):
            step(alone, range(i, i + 1))

    return {"one micro-batch at a time": one_at_a_time, "1F1B": lambda: step(together, range(MICRO_BATCHES))}
