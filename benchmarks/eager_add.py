"""What the client pays for ``x + y``: dtorch on two workers, PyTorch's DTensor on a mesh of two, and plain torch.

DTensor runs with torch's fake process group: its own Python and C++ cost with nothing communicated. Both add (4, 4) sharded on
dim 0. dtorch's workers are let catch up between rounds, outside the time.
"""

from __future__ import annotations

import torch

import dtorch

from .measure import Row, ratio, rounds, row


def run() -> list[Row]:
    torch.set_num_threads(1)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    ours = [dtorch.distribute_tensor(torch.rand(4, 4), mesh, [dtorch.Shard(0)]) for _ in range(2)]
    theirs = _dtensors()
    plain = [torch.rand(4, 4) for _ in range(2)]
    contestants = {
        "dtorch": lambda: ours[0] + ours[1],
        "DTensor": lambda: theirs[0] + theirs[1],
        "torch": lambda: plain[0] + plain[1],
    }
    rows = []
    for mode, context in (("", torch.enable_grad), (", no_grad", torch.no_grad), (", inference", torch.inference_mode)):
        with context():
            seconds = rounds(contestants, calls=2000, between=dtorch.synchronize)
        rows += [row(f"{name} x + y{mode}", times) for name, times in seconds.items()]
        rows.append(ratio(f"dtorch over DTensor{mode}", seconds["dtorch"], seconds["DTensor"], "at most 1.2"))
    dtorch.shutdown()
    return rows


def _dtensors() -> list[torch.Tensor]:
    import torch.distributed
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    return [DTensor.from_local(torch.rand(2, 4), mesh, [Shard(0)]) for _ in range(2)]
