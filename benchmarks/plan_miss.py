"""What an op costs the client the first time it meets a shape, as every step of a decode loop with a growing cache does.

The bound of 200 us is one for a machine whose plain ``x + x`` takes 1.2 us. Machines differ by a factor of three, so
the bound is on the ratio to an ``x + x`` timed at the same moment: 167.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import dtorch

from .measure import Row, ratio, row

F = torch.nn.functional

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, w: x + x,
    "mm": lambda x, w: x @ w,
    "softmax": lambda x, w: x.softmax(-1),
    "view": lambda x, w: x.view(-1, 4, 4),
    "transpose": lambda x, w: x.transpose(0, 1),
    "slice": lambda x, w: x[1:],
    "cat": lambda x, w: torch.cat([x, x], 1),
    "cat of the split dim, which moves": lambda x, w: torch.cat([x, x]),
    "sum": lambda x, w: x.sum(0),
    "mean": lambda x, w: x.mean(-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (16,)),
    "gelu": lambda x, w: F.gelu(x),
}
SIZES = range(8, 8 + 60)


def run() -> list[Row]:
    torch.set_num_threads(1)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    placed = [dtorch.distribute_tensor(torch.rand(size, 16), mesh, [dtorch.Shard(0)]) for size in SIZES]
    weight = dtorch.distribute_tensor(torch.rand(16, 16), mesh, [dtorch.Replicate()])
    small = torch.rand(4, 4)
    rows = []
    with torch.no_grad():
        for name, function in OPS.items():
            seconds, plain = [], []
            dtorch.synchronize()
            for tensor in placed:
                start = time.perf_counter()
                function(tensor, weight)
                seconds.append(time.perf_counter() - start)
                start = time.perf_counter()
                for _ in range(100):
                    small + small
                plain.append((time.perf_counter() - start) / 100)
            rows.append(row(f"{name}, new shape", seconds[5:]))
            rows.append(ratio(f"{name}, over torch x + x", seconds[5:], plain[5:], "at most 167"))
    dtorch.shutdown()
    return rows
