"""DeviceMesh and placements: what the page of public names says of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.tensor as upstream

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard


@pytest.mark.parametrize(
    "ids", [[[0, 1], [2, 3]], torch.tensor([[0, 1], [2, 3]]), numpy.array([[0, 1], [2, 3]]), ((0, 1), (2, 3))], ids=type
)
def test_a_grid_of_ids(ids: Any) -> None:
    mesh = DeviceMesh("cpu", ids, mesh_dim_names=["dp", "tp"])
    assert mesh.device_type == "cpu"
    assert mesh.shape == (2, 2)
    assert mesh.ndim == 2
    assert torch.equal(mesh.mesh, torch.tensor([[0, 1], [2, 3]]))
    assert mesh.mesh_dim_names == mesh.dim_names == ("dp", "tp")
    assert (mesh.size(), mesh.size(0), mesh.size(-1), mesh.size("tp")) == (4, 2, 2, 2)
    assert mesh.is_distributed
    assert repr(mesh) == "DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))"


def test_no_grid_is_one_device() -> None:
    assert DeviceMesh("cpu") == DeviceMesh("cpu", [0]) == DeviceMesh("cpu", 0) == DeviceMesh("cpu:0")
    assert DeviceMesh("cuda:1") == DeviceMesh("cuda", [1]) == DeviceMesh(torch.device("cuda", 1))
    assert not DeviceMesh("cpu").is_distributed


def test_init_device_mesh() -> None:
    assert dtorch.init_device_mesh("cpu", 3) == DeviceMesh("cpu", [0, 1, 2])
    assert dtorch.init_device_mesh("cpu", (2, 2), ("a", "b")) == DeviceMesh("cpu", [[0, 1], [2, 3]], ("a", "b"))


def test_names() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    assert mesh.has_dim_name("tp")
    assert not mesh.has_dim_name("pp")
    assert (mesh.dim_name_index("tp"), mesh.dim_name_index("pp"), mesh.dim_name_index("pp", -1)) == (1, None, -1)
    mesh.check_all_dim_names_in_set({"dp", "tp", "pp"})
    unnamed = DeviceMesh("cpu", [0, 1])
    assert unnamed.mesh_dim_names is None
    assert not unnamed.has_dim_name("tp")
    unnamed.check_all_dim_names_in_set(set())


def test_unbind() -> None:
    mesh = DeviceMesh("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], ("pp", "dp", "tp"))
    assert mesh.unbind("pp") == [
        DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp")),
        DeviceMesh("cpu", [[4, 5], [6, 7]], ("dp", "tp")),
    ]
    assert mesh.unbind(["pp", "dp"])[2] == DeviceMesh("cpu", [4, 5], ("tp",))
    assert mesh.unbind(-1)[1] == DeviceMesh("cpu", [[1, 3], [5, 7]], ("pp", "dp"))
    assert mesh.unbind("cp") == [mesh]
    assert mesh.unbind(["cp", "pp"]) == mesh.unbind("pp")
    assert mesh.unbind([0, 1, 2]) == [DeviceMesh("cpu", [i]) for i in range(8)]


def test_equality_and_hash_by_value() -> None:
    mesh = DeviceMesh("cpu", [0, 1], ("tp",))
    same = [DeviceMesh("cpu", [0, 1], ("tp",)), pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh)]
    assert {mesh, *same} == {mesh}
    others = [
        DeviceMesh("cpu", [1, 0], ("tp",)),
        DeviceMesh("cpu", [0, 1]),
        DeviceMesh("cuda", [0, 1], ("tp",)),
        DeviceMesh("cpu", [[0, 1]], ("a", "tp")),
    ]
    assert len({mesh, *others}) == 5
    assert mesh != "mesh"


def test_a_large_mesh_prints_short() -> None:
    assert repr(dtorch.init_device_mesh("cpu", (4, 108))) == "DeviceMesh('cpu', 432 devices, shape=(4, 108))"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Shard(1), upstream.Shard(1)), (Replicate(), upstream.Replicate()), (Partial(), upstream.Partial())],
    ids=str,
)
def test_placements_equal_torchs(ours: Any, theirs: Any, simulated: None) -> None:
    assert ours == theirs
    assert theirs == ours
    assert ours != Shard(0)
    assert hash(ours) == hash(theirs)
    assert pickle.loads(pickle.dumps(ours)) == ours
    x = dtorch.ones(4, 4, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[theirs])
    assert x.placements == [ours]
    assert x.check_placement(0, theirs)


@pytest.mark.parametrize("size", range(6))
def test_uneven_shards_split_as_chunk(size: int, simulated: None) -> None:
    values = torch.arange(size)
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    shards = dtorch.from_torch(values, mesh, [Shard(-1)]).local_shards()
    chunks = [*values.chunk(4), *[values[:0]] * 4][:4]
    for device, chunk in enumerate(chunks):
        assert torch.equal(shards[torch.device("cpu", device)], chunk)


def test_the_placements_of_a_tensor(simulated: None) -> None:
    x = dtorch.ones(4, 4, device_mesh=DeviceMesh("cpu", [[0, 1], [2, 3]]), placements=(Shard(-1), Replicate()))
    assert x.placements == [Shard(1), Replicate()] == x.placements
    assert x.placements == (Shard(1), Replicate())
    assert isinstance(x.placements, tuple)
    assert repr(x.placements) == "[Shard(dim=1), Replicate()]"


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [(4, 2, [0, 0, 1, 1]), (5, 2, [0, 0, 0, 1, 1]), (3, 3, [0, 1, 2]), (7, 3, [0, 0, 0, 1, 1, 2, 2])],
)
def test_assign_layers_to_stages(layers: int, stages: int, expected: list[int]) -> None:
    assert dtorch.assign_layers_to_stages(layers, stages) == expected
