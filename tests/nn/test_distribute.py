"""`distribute_module`: the module computes what it did, wherever the plan puts its tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, distribute_module, nn
from dtorch.placement import PackedShard

from .training import MESHES, assert_same, placed, plain, step

pytestmark = pytest.mark.usefixtures("engine")


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 6))


def encoder() -> torch.nn.Module:
    return torch.nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)


COLUMN, ROW = {"tp": Shard(0)}, {"tp": Shard(1)}
MLP = {"0.*": COLUMN, "2.weight": ROW}
ENCODER = {
    "self_attn.in_proj_*": COLUMN,
    "self_attn.out_proj.weight": ROW,
    "linear1.*": COLUMN,
    "linear2.weight": ROW,
}
MODELS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any]]] = {
    "mlp": (mlp, MLP),
    "encoder": (encoder, ENCODER),
}


@pytest.mark.parametrize("mesh", [name for name in MESHES if MESHES[name].mesh_dim_names])
@pytest.mark.parametrize("model", MODELS)
def test_a_model(model: str, mesh: str) -> None:
    make, plan = MODELS[model]
    torch.manual_seed(0)
    alone = make()
    x = torch.randn(4, 5, 6)
    there = copy.deepcopy(alone)
    assert distribute_module(there, MESHES[mesh], plan) is there
    assert all(p.device_mesh == MESHES[mesh] for p in there.parameters())
    assert_same(step(there, placed(x, MESHES[mesh])), step(alone, x))


def test_without_a_plan_all_is_replicated() -> None:
    module = distribute_module(mlp(), DeviceMesh("cpu", [0, 1]))
    assert {tuple(p.placements) for p in module.parameters()} == {(Replicate(),)}


@pytest.mark.parametrize("model", MODELS)
def test_fully_sharded(model: str) -> None:
    """Every parameter in parts, and the batch too."""
    torch.manual_seed(0)
    alone = MODELS[model][0]()
    x = torch.randn(4, 5, 6)
    there = distribute_module(copy.deepcopy(alone), MESHES["dp"], {"*": [Shard(0)]})
    assert {tuple(p.placements) for p in there.parameters()} == {(Shard(0),)}
    assert_same(step(there, placed(x, MESHES["dp"])), step(alone, x))


def test_the_first_match_wins_and_the_rest_replicate() -> None:
    there = distribute_module(mlp(), MESHES["tp2"], {"0.bias": [Replicate()], "0.*": [Shard(0)], "?.bias": [Shard(0)]})
    found = {name: list(p.placements) for name, p in there.named_parameters()}
    assert found == {
        "0.weight": [Shard(0)],
        "0.bias": [Replicate()],
        "2.weight": [Replicate()],
        "2.bias": [Shard(0)],
    }


def test_by_axis_name() -> None:
    plan = {"0.weight": {"tp": Shard(-2), "dp": Shard(1)}, "2.weight": {"pp": Shard(0), "ring_cp": Shard(0)}}
    there = distribute_module(mlp(), MESHES["dp tp"], plan)
    assert there[0].weight.placements == [Shard(1), Shard(0)]
    assert there[2].weight.placements == [Replicate(), Replicate()]  # axes of other meshes


class WithBuffers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(8.0).reshape(2, 4))
        self.register_buffer("positions", torch.arange(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x * self.scale) + self.table.sum(0) + self.positions


def test_buffers() -> None:
    """They are placed too; a glob that matches parameters says nothing of them, and a tensor without dims is whole."""
    alone = WithBuffers()
    there = distribute_module(copy.deepcopy(alone), MESHES["tp2"], {"*": [Shard(0)], "table": [Shard(1)]})
    assert there.table.placements == [Shard(1)]
    for whole in (there.scale, there.norm.running_mean, there.norm.num_batches_tracked, there.positions):
        assert whole.placements == [Replicate()]
    assert there.norm.weight.placements == [Shard(0)]
    assert list(there.state_dict()) == list(alone.state_dict())
    x = torch.randn(6, 4)
    for _ in range(2):
        torch.testing.assert_close(plain(there(placed(x, MESHES["tp2"]))), alone(x).detach())
    torch.testing.assert_close(plain(there.norm.running_var), alone.norm.running_var)
    assert there.norm.num_batches_tracked.item() == 2


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.head = torch.nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.again(self.embed(ids))


def test_tied_parameters_stay_tied(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    alone, ids = Tied(), torch.randint(10, (4, 5))
    for name in ("embed.weight", "head.weight", "again.weight"):
        there = distribute_module(copy.deepcopy(alone), MESHES["tp2"], {name: [Shard(0)]})
        assert there.embed.weight is there.head.weight
        assert there.embed.weight.placements == [Shard(0)]
        assert len(list(there.parameters())) == 1
        assert_same(step(there, placed(ids, MESHES["tp2"])), step(copy.deepcopy(alone), ids))
    with caplog.at_level(logging.WARNING, "dtorch"):
        there = distribute_module(
            copy.deepcopy(alone), MESHES["tp2"], {"head.weight": [Shard(0)], "embed.weight": [Shard(1)]}
        )
    assert there.embed.weight.placements == [Shard(0)]
    assert "one tied tensor" in caplog.text
    assert "one tied tensor" in str(dtorch.summary(there))


def test_what_a_module_on_the_meta_device_becomes(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    alone = encoder()
    with torch.device("meta"):
        there = distribute_module(encoder(), MESHES["dp tp"], ENCODER)
    assert there.linear2.weight.placements == [Replicate(), Shard(1)]
    assert there.linear2.weight.requires_grad
    there.load_state_dict(alone.state_dict())
    assert there.linear2.weight.placements == [Replicate(), Shard(1)]
    x = torch.randn(4, 5, 6)
    assert_same(step(there, placed(x, MESHES["dp tp"])), step(alone, x))
    with caplog.at_level(logging.WARNING, "dtorch"):
        distribute_module(WithBuffers().to("meta"), MESHES["tp2"], {})
    assert "no state dict fills, set them yourself: positions" in caplog.text


def test_the_parameters_are_the_same_objects() -> None:
    """An optimizer built before, attributes and gradients stay with them."""
    torch.manual_seed(0)
    alone = mlp()
    alone[2].bias.requires_grad_(False)
    x = torch.randn(4, 5, 6)
    there = copy.deepcopy(alone)
    for module in (alone, there):
        module(x).sum().backward()
    there[0].weight.note = "kept"
    parameters = list(there.parameters())
    optimizer = torch.optim.SGD(there.parameters(), lr=0.5)
    distribute_module(there, MESHES["tp2"], MLP)
    assert all(p is q for p, q in zip(there.parameters(), parameters, strict=True))
    assert there[0].weight.note == "kept"
    assert not there[2].bias.requires_grad
    assert there[0].weight.grad.placements == [Shard(0)]
    torch.testing.assert_close(plain(there[0].weight.grad), alone[0].weight.grad)
    optimizer.step()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    for p, q in zip(there.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(plain(p), q.detach())


def test_a_module_is_moved_between_meshes() -> None:
    torch.manual_seed(0)
    alone = mlp()
    there = distribute_module(copy.deepcopy(alone), MESHES["tp2"], MLP)
    x = torch.randn(2, 3, 6)
    there(placed(x, MESHES["tp2"])).sum().backward()
    parameters = list(there.parameters())
    distribute_module(there, MESHES["stage"], MLP)
    assert all(p is q for p, q in zip(there.parameters(), parameters, strict=True))
    assert there[0].weight.grad.device_mesh == MESHES["stage"]
    alone(x).sum().backward()
    assert_same(step(there, placed(x, MESHES["stage"])), step(alone, x))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU])
def test_parameters_that_others_look_at_weakly(kind: Any) -> None:
    torch.manual_seed(0)
    alone = kind(6, 4, batch_first=True)
    there = distribute_module(copy.deepcopy(alone), MESHES["dp"], {})
    x = torch.randn(4, 5, 6)
    call = lambda module: lambda x: module(x)[0]
    assert_same(step(there, placed(x, MESHES["dp"]), call=call(there)), step(alone, x, call=call(alone)))


def test_layers_of_ours_are_placed_anew() -> None:
    torch.manual_seed(0)
    alone = torch.nn.Linear(6, 4)
    layer = nn.ColumnParallelLinear(6, 4, device="meta")
    distribute_module(layer, MESHES["tp2"], {"*": COLUMN})
    layer.load_state_dict(alone.state_dict())
    x = torch.randn(2, 3, 6)
    out = layer(placed(x, MESHES["tp2"], Shard(1)))
    assert out.placements == [Shard(2)]  # its hooks are there
    torch.testing.assert_close(plain(out), alone(x).detach())


def test_a_graph_that_is_alive() -> None:
    module = mlp()
    loss = module(torch.ones(2, 6)).sum()
    with pytest.raises(RuntimeError, match=r"'2\.weight' is in use by an autograd graph; drop the loss"):
        distribute_module(module, MESHES["tp2"], {})
    del loss
    assert distribute_module(module, MESHES["tp2"], {})[0].weight.device_mesh == MESHES["tp2"]


def test_a_module_without_tensors() -> None:
    assert isinstance(distribute_module(torch.nn.ReLU(), MESHES["tp2"], {}), torch.nn.ReLU)


TP, GRID = MESHES["tp2"], MESHES["dp tp"]
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no module": (
        lambda: distribute_module([mlp()], TP, {}),
        TypeError,
        "'module' must be a torch.nn.Module, not list",
    ),
    "no mesh": (lambda: distribute_module(mlp(), "cpu", {}), TypeError, "'mesh' must be a DeviceMesh, not str"),
    "no plan": (lambda: distribute_module(mlp(), TP, [Shard(0)]), TypeError, "'plan' must be a dict.*or 'auto'"),
    "misspelt auto": (lambda: distribute_module(mlp(), TP, "Auto"), TypeError, "or 'auto', got 'Auto'"),
    "key": (lambda: distribute_module(mlp(), TP, {0: [Shard(0)]}), TypeError, "globs of parameter names, got 0"),
    "misspelt name": (
        lambda: distribute_module(encoder(), TP, {"linear1.wieght": [Shard(0)]}),
        ValueError,
        "no parameter or buffer matches 'linear1.wieght'; near misses: 'linear1.weight'",
    ),
    "misspelt in every layer": (
        lambda: distribute_module(
            torch.nn.TransformerEncoder(encoder(), 2), TP, {"layers.*.linear_1.weight": [Shard(0)]}
        ),
        ValueError,
        r"'layers\.\*\.linear_1\.weight'; near misses: 'layers\.\*\.linear1\.weight'",
    ),
    "a module's name": (
        lambda: distribute_module(encoder(), TP, {"self_attn.out_proj": [Shard(0)]}),
        ValueError,
        "names a module; its tensors are 'self_attn.out_proj.weight', 'self_attn.out_proj.bias'",
    ),
    "two at once": (
        lambda: distribute_module(mlp(), TP, {"a": [Shard(0)], "b": [Shard(0)]}),
        ValueError,
        r"(?s)matches 'a'.*its tensors are '\*\.weight'.*matches 'b'",
    ),
    "a plan for another model": (
        lambda: distribute_module(mlp(), TP, ENCODER),
        ValueError,
        r"matches 'self_attn\.in_proj_\*'",
    ),
    "nothing to match": (
        lambda: distribute_module(torch.nn.ReLU(), TP, {"*": [Shard(0)]}),
        ValueError,
        "no parameters or buffers",
    ),
    "a dim too far": (
        lambda: distribute_module(mlp(), TP, {"*": [Shard(1)]}),
        ValueError,
        r"plan\['\*'\] for '0.bias' of shape \(10,\).*Shard\(dim=1\) is out of range for a 1-d tensor",
    ),
    "mesh too small": (
        lambda: distribute_module(mlp(), TP, {"0.weight": [Shard(0), Shard(1)]}),
        ValueError,
        "the mesh is too small: it has 1 axes, the plan 2",
    ),
    "too few": (lambda: distribute_module(mlp(), GRID, {"0.weight": [Shard(0)]}), ValueError, "the mesh has 2, got 1"),
    "axis name": (
        lambda: distribute_module(mlp(), GRID, {"0.weight": {"tpp": Shard(0)}}),
        ValueError,
        r"no axis named 'tpp'; its axes are \['dp', 'tp'\]; near misses: 'tp'",
    ),
    "names on a mesh without": (
        lambda: distribute_module(mlp(), DeviceMesh("cpu", [0, 1]), {"0.weight": {"tp": Shard(0)}}),
        ValueError,
        "has no axis names; give mesh_dim_names= or a list",
    ),
    "no placements": (
        lambda: distribute_module(mlp(), TP, {"0.weight": Shard(0)}),
        TypeError,
        "expected a list of placements",
    ),
    "words": (
        lambda: distribute_module(mlp(), TP, {"0.weight": ["S(0)"]}),
        TypeError,
        "plan.*Shard, Replicate or Partial",
    ),
    "packed parts that do not divide": (
        lambda: distribute_module(mlp(), TP, {"0.bias": [Shard(0)], "2.weight": [PackedShard(0, 4)]}),
        ValueError,
        r"plan\['2\.weight'\] for '2\.weight'.*cannot be split into 4 parts over 2 devices evenly",
    ),
    "TorchScript": (
        lambda: distribute_module(torch.jit.script(torch.nn.Linear(2, 2)), TP, {}),
        TypeError,
        "a TorchScript module runs on plain tensors only",
    ),
    "pending": (
        lambda: distribute_module(mlp(), TP, {"0.weight": [dtorch.Partial()]}),
        ValueError,
        "cannot be a pending sum",
    ),
    "lazy": (
        lambda: distribute_module(torch.nn.LazyLinear(3), TP, {}),
        TypeError,
        "'weight' is a UninitializedParameter.*once first",
    ),
    "no plan of its own": (
        lambda: distribute_module(mlp(), TP, "auto"),
        ValueError,
        "Sequential has no tensor-parallel plan of its own",
    ),
    "cuda": (lambda: distribute_module(mlp(), DeviceMesh("cuda", [0]), {}), dtorch.errors.DeviceUnavailable, "cuda"),
    "summary": (lambda: dtorch.summary(3), TypeError, "'module' must be a torch.nn.Module, not int"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        call()


def test_nothing_is_placed_when_something_is_wrong() -> None:
    module = mlp()
    module[2].bias.register_hook(lambda grad: grad)
    with pytest.raises(TypeError, match=r"'2\.bias' has hooks"):
        distribute_module(module, TP, {})
    with pytest.raises(ValueError, match="nothing"):
        distribute_module(module[0], TP, {"*": [Shard(0)], "nothing": [Shard(0)]})
    assert not any(isinstance(p, dtorch.Tensor) for p in module.parameters())


@pytest.mark.usefixtures("simulated")
def test_one_device_has_no_axes_to_name() -> None:
    """A stage of a mesh of stages only: a plan, or a dict, of axes that it lacks says nothing of it."""
    stage = DeviceMesh("cpu", [0, 1], ("pp",)).unbind("pp")[1]
    layer = dtorch.distribute_module(torch.nn.Linear(4, 4), stage, {"*": {"tp": Shard(0)}})
    assert layer.weight.placements == [Replicate()]
    with pytest.raises(ValueError, match="no axis named 'tpp'"):
        dtorch.distribute_module(torch.nn.Linear(4, 4), stage, {"*": {"tpp": Shard(0)}})
    for mode in ("raise_error", "replicate", "keep"):
        x = dtorch.ones(4).redistribute_by_dict(stage, {"dp": Shard(0)}, default_placement_mode=mode)
        assert (x.device_mesh, x.placements) == (stage, [Replicate()])
    with pytest.raises(ValueError, match="has no axis names"):
        x.redistribute_by_dict(DeviceMesh("cpu", [0, 1]), {"dp": Shard(0)})
