"""100 MB from the client to two workers and back, beside a plain copy of as many bytes in memory."""

from __future__ import annotations

import torch

import dtorch

from .measure import Row, ratio, rounds, row

BYTES = 100_000_000


def run() -> list[Row]:
    torch.set_num_threads(1)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    source, target = torch.rand(BYTES // 4), torch.rand(BYTES // 4)
    placements = [dtorch.Shard(0)]
    there = dtorch.distribute_tensor(source, mesh, placements)

    def put() -> None:
        dtorch.distribute_tensor(source, mesh, placements)
        dtorch.synchronize()

    def round_trip() -> None:
        dtorch.distribute_tensor(source, mesh, placements).to_torch()

    def copy_twice() -> None:
        target.copy_(source)
        target.copy_(source)

    seconds = rounds(
        {
            "memcpy, twice": copy_twice,
            "memcpy to fresh memory, twice": lambda: (source.clone(), source.clone()),
            "client to workers": put,
            "workers to client": there.to_torch,
            "round trip": round_trip,
        },
        calls=1,
        between=dtorch.synchronize,
    )
    rows = [row(name, times, 1e3, "ms") for name, times in seconds.items()]
    rows.append(ratio("round trip over memcpy twice", seconds["round trip"], seconds["memcpy, twice"], "at most 3"))
    dtorch.shutdown()
    return rows
