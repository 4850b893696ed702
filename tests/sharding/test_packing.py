"""Packed dims: what devices hold of them, and the shapes under which they are none. (`test_rules` has the rules that know them.)"""

from __future__ import annotations

import itertools

import pytest
import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import PARTIAL, REPLICATE, PlacementList, is_partial, packed, shard
from dtorch.sharding import packing
from dtorch.sharding.layout import local_box, local_shape
from dtorch.sharding.spec import Spec

MESH = DeviceMesh("cpu", [0, 1])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]])
R, P = REPLICATE, PARTIAL


def test_what_a_device_holds() -> None:
    mine = PlacementList([packed(1, 2), shard(0)])
    assert [local_shape(mine, (2, 2), at, (5, 12)) for at in itertools.product((0, 1), repeat=2)] == [
        (3, 6), (2, 6), (3, 6), (2, 6),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="not one box"):
        local_box(mine, (2, 2), (0, 0), (5, 12))


def test_what_cannot_be_packed() -> None:
    with pytest.raises(
        ValueError, match=r"dim 0 of shape \(6,\) cannot be split into 2 parts over 2 devices evenly; use Shard\(0\)"
    ):
        Spec.of(MESH, [packed(0, 2)], (6,), None, torch.float32)
    with pytest.raises(ValueError, match=r"another axis splits dim 0, which PackedShard\(dim=0, parts=2\) packs"):
        Spec.of(GRID, [packed(0, 2), shard(0)], (8,), None, torch.float32)


@pytest.mark.parametrize(
    ("source", "target", "fine"),
    [
        (packed(1, 2), R, ([shard(2)], [R])),
        (packed(1, 2), shard(0), ([shard(2)], [shard(0)])),
        (P, packed(0, 3), ([P], [shard(1)])),
        (packed(0, 2), packed(1, 2), ([shard(1)], [shard(3)])),
        (packed(1, 2), shard(1), None),
        (packed(1, 2), packed(1, 3), None),
    ],
)
def test_both_ends_without_packed_dims(source: object, target: object, fine: object) -> None:
    spec = Spec.of(MESH, [source], (12, 12), (1, 12), torch.float32)
    found = packing.unpacked(spec, spec.with_placements([target]))
    if fine is None:
        assert found is None
        assert packing.between(spec, spec.with_placements([target])).placements == [R]
    else:
        assert tuple(end.placements for end in found) == fine
        assert found[0].shape == found[1].shape
        assert not any(is_partial(p) for p in found[1].placements)
