"""256 MB from the client to two workers and back, beside a plain copy of as many bytes in memory.

``target.copy_(source)`` between two tensors that are there already is what "memcpy" means here. ``put`` ends when the workers hold the
value, ``get`` when the client does, in a tensor of its own.
"""

from __future__ import annotations

import torch

import dtorch

from .measure import Row, ratio, rounds, row

BYTES = 256 << 20


def run() -> list[Row]:
    torch.set_num_threads(1)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    source, target = torch.rand(BYTES // 4), torch.zeros(BYTES // 4)
    sharded, replicated = [dtorch.Shard(0)], [dtorch.Replicate()]
    there = dtorch.distribute_tensor(source, mesh, sharded)
    everywhere = dtorch.distribute_tensor(source, mesh, replicated)
    assert torch.equal(there.to_torch(), source)

    def put(placements: list) -> None:
        dtorch.distribute_tensor(source, mesh, placements)
        dtorch.synchronize()

    seconds = rounds(
        {
            "memcpy": lambda: target.copy_(source),
            "memcpy to fresh memory": source.clone,
            "to the workers, sharded": lambda: put(sharded),
            "to the workers, replicated": lambda: put(replicated),
            "from the workers, sharded": there.to_torch,
            "from the workers, replicated": everywhere.to_torch,
        },
        calls=1,
        repeat=9,
        between=dtorch.synchronize,
    )
    rows = [row(name, times, 1e3, "ms") for name, times in seconds.items()]
    rows += [
        ratio(f"memcpy over {name}", seconds["memcpy"], times, "at least 0.6")
        for name, times in seconds.items()
        if "workers" in name
    ]
    dtorch.shutdown()
    return rows
