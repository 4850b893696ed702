"""A parallel layer is its torch.nn counterpart, on every mesh it may be built on: forward, backward and one optimizer step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, nn
from dtorch.client import runtime

from .training import MESHES, assert_same, placed, plain, step

pytestmark = pytest.mark.usefixtures("engine")

LINEARS = {
    "col": lambda *a, **k: nn.Linear(*a, tp_shard_type="col", **k),
    "row": lambda *a, **k: nn.Linear(*a, tp_shard_type="row", **k),
    "column": nn.ColumnParallelLinear,
    "column out": nn.ColumnParallelLinearWithReplicateOutput,
    "column in out": nn.ColumnParallelLinearWithReplicateInputOutput,
    "row parallel": nn.RowParallelLinear,
    "row out": nn.RowParallelLinearWithReplicateOutput,
    "replicate": nn.ReplicateParallelLinear,
}
EMBEDDINGS = {
    "col": lambda *a, **k: nn.Embedding(*a, tp_shard_type="col", **k),
    "row": lambda *a, **k: nn.Embedding(*a, tp_shard_type="row", **k),
    "out": nn.EmbeddingWithReplicateOutput,
    "row out": lambda *a, **k: nn.EmbeddingWithReplicateOutput(*a, tp_shard_type="row", **k),
}

#: How the input comes, along tp.
INPUTS = {"whole": Replicate(), "by sequence": Shard(1), "by features": Shard(2)}

every_mesh = pytest.mark.parametrize("mesh", MESHES)


def loaded(layer: torch.nn.Module, source: torch.nn.Module) -> torch.nn.Module:
    layer.load_state_dict(source.state_dict())
    return layer


@every_mesh
@pytest.mark.parametrize("kind", LINEARS)
def test_linear(kind: str, mesh: str) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(7, 5)  # neither is a multiple of 2 or 3
    x = torch.randn(4, 6, 7)
    layer = loaded(LINEARS[kind](7, 5, device_mesh=MESHES[mesh]), alone)
    assert isinstance(layer, torch.nn.Linear)
    expected = step(alone, x)
    for tp in INPUTS.values() if "tp" in mesh else [None]:
        one = copy.deepcopy(layer)
        assert_same(step(one, placed(x, MESHES[mesh], tp)), expected)


@every_mesh
@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_embedding(kind: str, mesh: str) -> None:
    torch.manual_seed(0)
    alone = torch.nn.Embedding(11, 5, padding_idx=3)
    ids = torch.randint(11, (4, 6))
    layer = loaded(EMBEDDINGS[kind](11, 5, 3, device_mesh=MESHES[mesh]), alone)
    expected = step(alone, ids)
    for tp in (Replicate(), Shard(1)) if "tp" in mesh else [None]:
        assert_same(step(copy.deepcopy(layer), placed(ids, MESHES[mesh], tp)), expected)


OUTPUTS = {
    "col": Shard(2),
    "column": Shard(2),
    "column out": Replicate(),
    "column in out": Replicate(),
    "row out": Replicate(),
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("tp", INPUTS)
def test_where_the_output_is(kind: str, tp: str) -> None:
    """Along tp as the layer says, whatever comes in; along the other axes as the input is."""
    layer = LINEARS[kind](8, 6, device_mesh=MESHES["dp tp"])
    out = layer(placed(torch.ones(4, 6, 8), MESHES["dp tp"], INPUTS[tp]))
    assert out.placements == [Shard(0), OUTPUTS[kind]]


def test_row_leaves_a_pending_sum() -> None:
    layer = nn.RowParallelLinear(64, 32, device_mesh=MESHES["tp2"])
    assert layer(placed(torch.ones(2, 2, 64), MESHES["tp2"], Shard(2))).placements == [dtorch.Partial()]


PLACEMENTS = {
    "col": ([Shard(0)], [Shard(0)]),
    "row": ([Shard(1)], [Replicate()]),
    "column": ([Shard(0)], [Shard(0)]),
    "row parallel": ([Shard(1)], [Replicate()]),
    "replicate": ([Replicate()], [Replicate()]),
}


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_where_the_parameters_are(kind: str) -> None:
    layer = LINEARS[kind](8, 6, device_mesh=MESHES["tp2"])
    assert (layer.weight.placements, layer.bias.placements) == PLACEMENTS[kind]
    assert f"weight={layer.weight.placements}, bias={layer.bias.placements}" in repr(layer)
    elsewhere = LINEARS[kind](8, 6, device_mesh=MESHES["tp2"], tp_dim="cp")  # the mesh has no such axis
    assert elsewhere.weight.placements == [Replicate()]
    assert layer.weight.local_shards()[torch.device("cpu", 1)].numel() == 48 // (1 if kind == "replicate" else 2)


@pytest.mark.parametrize("kind", [*LINEARS])
def test_dtype_and_bias(kind: str) -> None:
    layer = LINEARS[kind](4, 3, bias=False, dtype=torch.float64, device_mesh=MESHES["tp2"])
    assert (layer.bias, layer.weight.dtype, list(layer.state_dict())) == (None, torch.float64, ["weight"])
    assert layer(placed(torch.ones(2, 2, 4, dtype=torch.float64), MESHES["tp2"])).dtype == torch.float64


MAKE = {
    "linear": (lambda: torch.nn.Linear(7, 5), [lambda m, k=k: LINEARS[k](7, 5, device_mesh=m) for k in LINEARS]),
    "embedding": (
        lambda: torch.nn.Embedding(9, 4, 2),
        [lambda m, k=k: EMBEDDINGS[k](9, 4, 2, device_mesh=m) for k in EMBEDDINGS],
    ),
}


@pytest.mark.parametrize("what", MAKE)
def test_values_do_not_depend_on_the_mesh(what: str) -> None:
    makers = MAKE[what][1]
    found = []
    for make in makers:
        for mesh in ("one device", "tp2", "dp tp"):
            torch.manual_seed(3)
            found.append({name: plain(p) for name, p in make(MESHES[mesh]).state_dict().items()})
    for other in found[1:]:
        assert all(torch.equal(found[0][name], other[name]) for name in found[0])
    alone = MAKE[what][0]()
    bound = 7**-0.5
    if what == "linear":
        assert 0.5 * bound < found[0]["weight"].abs().max() <= bound
    else:
        assert found[0]["weight"][2].eq(0).all()
    assert {n: v.shape for n, v in found[0].items()} == {n: v.shape for n, v in alone.state_dict().items()}


@pytest.mark.parametrize("what", MAKE)
def test_with_torchs_random_numbers_they_are_torchs(what: str, engine: str) -> None:
    dtorch.shutdown()
    dtorch.init(engine=engine, random="torch")
    try:
        torch.manual_seed(3)
        expected = [MAKE[what][0]().state_dict() for _ in range(2)][-1]  # the second: as many numbers have been drawn
        for make in MAKE[what][1]:
            torch.manual_seed(3)
            actual = [make(MESHES["dp tp"]).state_dict() for _ in range(2)][-1]
            assert all(torch.equal(plain(actual[name]), expected[name]) for name in expected)
    finally:
        dtorch.shutdown()
        dtorch.init(engine=engine)


def test_parameters_are_made_on_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client never holds their values, and sends none: nor for a module that was built on the meta device."""

    def put(self: Any, tensor: torch.Tensor, spec: Any) -> Any:
        raise AssertionError(f"the client sends a tensor of shape {tuple(tensor.shape)}")

    monkeypatch.setattr(type(runtime.controller()), "put", put)
    with pytest.raises(AssertionError, match=r"shape \(2,\)"):
        dtorch.from_torch(torch.ones(2), MESHES["tp2"])
    for make in (*LINEARS.values(), *EMBEDDINGS.values()):
        make(512, 256, device_mesh=MESHES["dp tp"])
    dtorch.distribute_module(torch.nn.Linear(512, 256, device="meta"), MESHES["tp2"], {"*": [Shard(0)]})
    dtorch.synchronize()


def test_state_dicts_go_both_ways() -> None:
    alone, layer = torch.nn.Linear(6, 4), nn.ColumnParallelLinear(6, 4, device_mesh=MESHES["tp2"])
    assert list(layer.state_dict()) == list(alone.state_dict())
    layer.load_state_dict(alone.state_dict())
    assert torch.equal(plain(layer.weight), alone.weight.detach())
    assert layer.weight.placements == [Shard(0)]
    other = torch.nn.Linear(6, 4)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.bias, alone.bias)
    rows = nn.RowParallelLinear(6, 4, device_mesh=MESHES["tp2"])
    rows.load_state_dict(layer.state_dict())
    assert rows.weight.placements == [Shard(1)]
    assert torch.equal(plain(rows.weight), alone.weight.detach())
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        layer.load_state_dict(torch.nn.Linear(3, 3).state_dict())


def test_without_a_mesh_they_are_torchs() -> None:
    """The same numbers, the same repr, the same outputs: and plain parameters."""
    for ours, theirs in (
        (nn.Linear, torch.nn.Linear),
        (nn.Embedding, torch.nn.Embedding),
        (nn.ColumnParallelLinear, torch.nn.Linear),
    ):
        torch.manual_seed(0)
        a = ours(4, 3)
        torch.manual_seed(0)
        b = theirs(4, 3)
        assert repr(a) == repr(b).replace("Linear", type(a).__name__)
        assert type(a.weight) is torch.nn.Parameter
        assert torch.equal(a.weight, b.weight)
    assert ours(4, 3, True, "meta", torch.float64).weight.is_meta
    assert torch.equal(nn.Embedding.from_pretrained(torch.eye(3))(torch.tensor([2])), torch.eye(3)[2:])


def test_a_default_mesh() -> None:
    """A layer with a parallel name is parallel on it; a Linear is what torch's is there: replicated."""
    with dtorch.default_mesh(MESHES["tp2"]):
        assert nn.RowParallelLinear(4, 3).weight.placements == [Shard(1)]
        assert nn.EmbeddingWithReplicateOutput(4, 3).weight.placements == [Shard(1)]
        assert nn.Linear(4, 3).weight.placements == [Replicate()]


def test_what_torchs_layers_take_is_taken() -> None:
    mesh = MESHES["tp2"]
    x = placed(torch.ones(1, 2, 4), mesh)
    layer = nn.ColumnParallelLinear(4, 3, device_mesh=mesh)
    torch.testing.assert_close(plain(layer(input=x)), plain(layer(x)))
    torch.testing.assert_close(plain(layer(torch.ones(1, 2, 4))), plain(layer(x)))  # a plain tensor is a replicated one
    torch.testing.assert_close(plain(layer(dtorch.ones(1, 2, 4))), plain(layer(x)))  # and so is one of no mesh
    torch.testing.assert_close(plain(layer(x[0, 0])), plain(layer(x))[0, 0])  # one vector
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(placed(torch.ones(1, 2, 3), mesh))
    with pytest.raises(dtorch.errors.MeshMismatch, match="redistribute"):
        layer(placed(torch.ones(1, 2, 4), MESHES["stage"]))
    frozen = nn.Embedding(4, 3, device_mesh=mesh, _freeze=True)
    assert not frozen.weight.requires_grad
    given = nn.Embedding(3, 3, _weight=torch.eye(3), device_mesh=mesh)
    assert torch.equal(plain(given.weight), torch.eye(3))


def test_isinstance_finds_torchs_own_layers_too() -> None:
    assert isinstance(torch.nn.Linear(2, 2), nn.Linear)
    assert isinstance(torch.nn.Embedding(2, 2), nn.Embedding)
    assert isinstance(nn.RowParallelLinear(2, 2), nn.Linear)
    assert not isinstance(torch.nn.Linear(2, 2), nn.ColumnParallelLinear)
    assert not isinstance(torch.nn.ReLU(), nn.Linear)


MESH = MESHES["tp2"]
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "shard type": (lambda: nn.Linear(4, 3, tp_shard_type="column"), ValueError, "'col', 'row', got 'column'"),
    "embedding's shard type": (lambda: nn.Embedding(4, 3, tp_shard_type=0), ValueError, "'col', 'row', got 0"),
    "mesh": (
        lambda: nn.ColumnParallelLinear(4, 3, device_mesh="cpu"),
        TypeError,
        "'device_mesh' must be a DeviceMesh, not str",
    ),
    "axis by number": (
        lambda: nn.Linear(4, 3, device_mesh=MESH, tp_dim=0),
        TypeError,
        "'tp_dim' must be the name of a mesh axis, not int",
    ),
    "device too": (lambda: nn.Linear(4, 3, device="cpu", device_mesh=MESH), ValueError, "device= and device_mesh="),
    "sparse": (lambda: nn.Embedding(4, 3, sparse=True, device_mesh=MESH), ValueError, "sparse gradients"),
    "padding": (lambda: nn.Embedding(4, 3, padding_idx=9, device_mesh=MESH), AssertionError, "within num_embeddings"),
    "negative": (lambda: nn.ColumnParallelLinear(-4, 3, device_mesh=MESH), RuntimeError, "negative dimension -4"),
    "cuda": (lambda: nn.Linear(4, 3, device_mesh=DeviceMesh("cuda", [0])), dtorch.errors.DeviceUnavailable, "cuda"),
    "unknown": (lambda: nn.NoSuchLayer, AttributeError, "'NoSuchLayer'.*torch.nn"),
    "unknown function": (lambda: nn.functional.nothing, AttributeError, "'nothing'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    call, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        call()
