"""`summary`: the table adds up to what the workers hold."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Shard, distribute_module, summary

from .training import MESHES

pytestmark = pytest.mark.usefixtures("engine")


def model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3, dtype=torch.float64)
    )


@pytest.mark.parametrize("mesh", ["one device", "tp3", "dp tp"])
def test_bytes_are_those_the_workers_hold(mesh: str) -> None:
    plan = {} if mesh == "one device" else {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
    there = distribute_module(model(), MESHES[mesh], plan)
    found = summary(there)
    for row in found.rows:
        tensor = there.state_dict()[row.name]
        held = {device: part.numel() * part.element_size() for device, part in tensor.local_shards().items()}
        assert row.bytes_by_device == held
        assert row.bytes_per_device == max(held.values())
        assert row.nbytes == tensor.numel() * tensor.element_size()
    totals = found.bytes_by_device
    assert sum(totals.values()) == sum(sum(row.bytes_by_device.values()) for row in found.rows)


TABLE = """\
DeviceMesh('cpu', [0, 1], mesh_dim_names=('tp',))
parameter              shape   dtype    placements      bytes per device
---------------------  ------  -------  --------------  ----------------
0.weight               (7, 6)  float32  [Shard(dim=0)]                96
0.bias                 (7,)    float32  [Shard(dim=0)]                16
1.weight               (7,)    float32  [Replicate()]                 28
1.bias                 (7,)    float32  [Replicate()]                 28
1.running_mean         (7,)    float32  [Replicate()]                 28
1.running_var          (7,)    float32  [Replicate()]                 28
1.num_batches_tracked  ()      int64    [Replicate()]                  8
2.weight               (3, 7)  float64  [Shard(dim=1)]                96
2.bias                 (3,)    float64  [Replicate()]                 24
6 parameters of 87 elements, 3 buffers: 508 bytes; at most 352 on one of 2 devices"""


def test_the_table() -> None:
    there = distribute_module(model(), MESHES["tp2"], {"0.*": [Shard(0)], "2.weight": [Shard(1)]})
    assert str(summary(there)) == TABLE
    assert repr(summary(there)) == TABLE


def test_plain_and_tied_tensors_and_two_meshes() -> None:
    parts = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2), "c": torch.nn.Linear(2, 2)})
    parts["c"].weight = parts["a"].weight
    distribute_module(parts["a"], MESHES["tp2"], {})
    distribute_module(parts["b"], MESHES["stage"], {})
    text = str(summary(parts))
    assert "mesh 0: DeviceMesh('cpu', [0, 1]" in text
    assert "mesh 1: DeviceMesh('cpu', [2, 3]" in text
    assert "a.weight = c.weight" in text
    assert "[Replicate()] on mesh 1" in text
    assert "plain" in text
    assert "0 parameters of 0 elements" in str(summary(torch.nn.ReLU()))
    assert isinstance(summary(parts), dtorch.nn.Summary)
