"""The hooks around forward; and sequence parallelism, which is a placement of the input, not another class of norm or dropout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, nn

from .training import MESHES, assert_same, placed, plain, step

pytestmark = pytest.mark.usefixtures("engine")

MESH = MESHES["dp tp"]


class ScatteredOutput(nn.RowParallelLinear):
    """Sums into parts of the sequence (a reduce-scatter) where Megatron's layer makes them whole (an all-reduce)."""

    def redistribute_output(self, out: Any) -> Any:
        return self.along(out, Shard(1))


class Block(torch.nn.Module):
    """Norm, MLP, dropout, residual: the part of a transformer that sequence parallelism splits. ``kinds`` are its two linear layers."""

    def __init__(self, up: Any, down: Any, dropout: float) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = up, down
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def blocks(dropout: float, mesh: dtorch.DeviceMesh) -> tuple[Block, Block]:
    """The block in plain torch, and with the same weights in parallel."""
    torch.manual_seed(0)
    alone = Block(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8), dropout)
    parallel = Block(
        nn.ColumnParallelLinear(8, 12, device_mesh=mesh), ScatteredOutput(12, 8, device_mesh=mesh), dropout
    )
    dtorch.distribute_module(parallel.norm, mesh, {})
    parallel.load_state_dict(alone.state_dict())
    return alone, parallel


@pytest.mark.parametrize("length", [6, 5])
def test_sequence_parallelism_is_a_placement(length: int) -> None:
    alone, parallel = blocks(0.0, MESH)
    x = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(1))
    seen = []
    for part in (parallel.norm, parallel.dropout):
        part.register_forward_hook(lambda module, inputs, out: seen.append(list(out.placements)))
    assert_same(step(parallel, placed(x, MESH, Shard(1))), step(alone, x))
    assert seen == [[Shard(0), Shard(1)]] * 2  # never gathered


def test_dropout_of_a_sequence_shard_is_torchs(engine: str) -> None:
    dtorch.shutdown()
    dtorch.init(engine=engine, random="torch")
    try:
        alone, parallel = blocks(0.5, MESH)
        x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(5)
        expected = step(alone, x)
        torch.manual_seed(5)
        assert_same(step(parallel, placed(x, MESH, Shard(1))), expected)
    finally:
        dtorch.shutdown()
        dtorch.init(engine=engine)


def test_dropout_does_not_depend_on_the_placement() -> None:
    drop = torch.nn.Dropout(0.5)
    found = []
    for tp in (Replicate(), Shard(1), Shard(2)):
        torch.manual_seed(2)
        out = drop(placed(torch.ones(4, 6, 8), MESH, tp))
        assert out.placements == [Shard(0), tp]
        found.append(plain(out))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert 0.3 < found[0].eq(0).float().mean() < 0.7


def test_hooks_see_what_the_layer_is_called_with() -> None:
    """In the order of the call: (args, kwargs) in and back, then the output; a subclass may change both."""

    class Doubled(nn.ColumnParallelLinear):
        def redistribute_input(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(("in", args, kwargs))
            return (args[0] * scale if args else kwargs["input"] * scale,), {}

        def redistribute_output(self, out: Any) -> Any:
            seen.append(("out", list(out.placements)))
            return super().redistribute_output(out) + 1

    seen: list[Any] = []
    scale = 2
    layer = Doubled(4, 6, bias=False, device_mesh=MESHES["tp2"])
    alone = torch.nn.Linear(4, 6, bias=False)
    layer.load_state_dict(alone.state_dict())
    x = torch.ones(1, 2, 4)
    given = placed(x, MESHES["tp2"])
    torch.testing.assert_close(plain(layer(given)), alone(x * 2).detach() + 1)
    torch.testing.assert_close(plain(layer(input=given)), alone(x * 2).detach() + 1)
    assert [entry[0] for entry in seen] == ["in", "out"] * 2
    assert seen[0][1][0] is given
    assert seen[2][2]["input"] is given


def test_torchs_own_hooks_see_what_the_caller_sees() -> None:
    layer = nn.ColumnParallelLinearWithReplicateOutput(4, 6, device_mesh=MESHES["tp2"])
    seen = []
    layer.register_forward_hook(lambda module, inputs, out: seen.append((inputs[0], out)))
    x = placed(torch.ones(1, 2, 4), MESHES["tp2"], Shard(1))
    out = layer(x)
    assert seen[0][0] is x
    assert seen[0][1] is out


def test_layers_are_copied_and_pickled(tmp_path: Any) -> None:
    layer = nn.RowParallelLinear(4, 6, device_mesh=MESHES["tp2"])
    torch.save(layer, tmp_path / "layer.pt")
    x = placed(torch.ones(1, 2, 4), MESHES["tp2"])
    for other in (copy.deepcopy(layer), torch.load(tmp_path / "layer.pt", weights_only=False)):
        assert type(other) is nn.RowParallelLinear
        assert other.weight.placements == [Shard(1)]
        assert torch.equal(plain(other(x)), plain(layer(x)))
