"""What the client keeps for the next op of a shape: bytes a plan, and what many distinct shapes leave behind.

Each size is met by an add, a softmax, a view, a slice, a sum and a gathering cumsum, in simulation. The bytes are Python's own, as
tracemalloc counts them, of client and simulated workers together. Then the limit is lowered to 2000 plans: after 6000 shapes as many are
kept as after 3000, and what still grows are caches of transfers, which have limits of their own.
"""

from __future__ import annotations

import gc
import tracemalloc

import torch

import dtorch
from dtorch.client import planning

from .measure import Row

SHAPES = 400


def _meet(mesh: dtorch.DeviceMesh, sizes: range, all_ops: bool) -> None:
    for size in sizes:
        x = dtorch.empty(size, 16, device_mesh=mesh, placements=[dtorch.Shard(0)])
        y = x + x
        if all_ops:
            y.softmax(-1), y.view(-1), y[1:], y.sum(0), y.cumsum(0)
    dtorch.synchronize()


def _traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def run() -> list[Row]:
    torch.set_num_threads(1)
    dtorch.init(engine="simulate")
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    plans, forms = planning.PLANS, planning.FORMS
    with torch.no_grad():
        _meet(mesh, range(10, 60), all_ops=True)
        tracemalloc.start()
        before, kept = _traced(), plans.kept
        _meet(mesh, range(100, 100 + SHAPES), all_ops=True)
        a_plan = (_traced() - before) / (plans.kept - kept)
        for recent in (plans, forms):
            recent.forget()
            recent.limit, recent.evictions = 2000, 0
        found = []
        for start in (10_000, 13_000):
            _meet(mesh, range(start, start + 3000), all_ops=False)
            found.append((_traced(), plans.kept))
        tracemalloc.stop()
    rows = [
        Row("a kept plan", a_plan / 1024, "KB", bound="at most 20"),
        Row("plans kept after 3000 shapes more than the limit's 2000", found[0][1], "plans", bound="at most 2000"),
        Row("plans kept after another 3000", found[1][1], "plans", bound="at most 2000"),
        Row("plans forgotten", plans.evictions, "plans"),
        Row("memory after the second 3000 over after the first", found[1][0] / found[0][0], "×"),
    ]
    dtorch.shutdown()
    return rows
