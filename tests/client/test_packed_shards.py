"""A weight that is several matrices in one, split so that a device has its part of each: same values, and nothing moves."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.placement import PackedShard

pytestmark = pytest.mark.usefixtures("engine")

MESH = DeviceMesh("cpu", [0, 1], ("tp",))
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
OTHER = DeviceMesh("cpu", [1, 2], ("tp",))
PACKED = PackedShard(0, 2)
X = torch.arange(8 * 16.0).reshape(8, 16)


def test_what_it_is() -> None:
    x = dtorch.from_torch(X, MESH, [PACKED])
    assert x.placements == [PackedShard(0, 2)] != [PackedShard(0, 4)]
    assert x.placements != [Shard(0)]
    assert repr(x.placements) == "[PackedShard(dim=0, parts=2)]"
    rows = [t[:, 0].div(16).tolist() for t in x.local_shards().values()]
    assert rows == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert torch.equal(x.to_torch(), X)
    again = pickle.loads(pickle.dumps(x))
    assert again.placements == copy.deepcopy(x).placements == [PACKED]
    assert torch.equal(again.to_torch(), X)


PLACEMENTS = (Replicate(), Shard(0), Shard(1), PackedShard(0, 2), PackedShard(0, 4), PackedShard(1, 2), Partial())


@pytest.mark.parametrize(("source", "target"), itertools.product(PLACEMENTS, repeat=2))
def test_any_to_any(source: Any, target: Any) -> None:
    for x in (X, X.t()):
        start = dtorch.from_torch(x, MESH, [source])
        there = start.redistribute(placements=[target])
        assert there.placements == [target]
        assert torch.equal(there.to_torch(), x)
        assert torch.equal(there.redistribute(OTHER, [source]).to_torch(), x)
    for split in ([Shard(1), source], [source, Shard(1)]):
        if getattr(source, "dim", 0) == 0 and not isinstance(target, Partial):
            grid = dtorch.from_torch(X, GRID, split)
            goal = [Replicate() if getattr(target, "dim", 0) == 1 else Shard(1), target]
            assert torch.equal(grid.redistribute(placements=goal).to_torch(), X)


class Gated(torch.nn.Module):
    """The two matrices of a SwiGLU in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = torch.nn.Linear(6, 16), torch.nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("mesh", [MESH, GRID], ids=["tp", "dp tp"])
def test_training_moves_what_two_matrices_would(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    alone = Gated()
    there = dtorch.distribute_module(
        copy.deepcopy(alone), mesh, {"gate_up.*": {"tp": PACKED}, "down.weight": {"tp": Shard(1)}}
    )
    x = torch.randn(4, 6)
    batch = [Replicate()] if mesh is MESH else [Shard(0), Replicate()]
    with dtorch.record() as r:
        for model, inputs in ((alone, x), (there, dtorch.from_torch(x, mesh, batch))):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            for _ in range(3):
                loss = model(inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
    for (name, p), expected in zip(there.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.detach().to_torch(), expected.detach(), msg=name)
    assert there.gate_up.weight.grad.placements[-1] == PACKED
    assert r.fallbacks == []
    assert not any("all_gather" in one.kind or "all_to_all" in one.kind for one in r.communication)


def test_ops_that_know_no_packed_dims() -> None:
    """They get their input whole: slower, and right."""
    x = dtorch.from_torch(X, MESH, [PACKED])
    for op in (
        lambda t: t.reshape(2, 4, 16),
        lambda t: t.flatten(),
        lambda t: t.cumsum(0),
        lambda t: t[1:5],
        lambda t: t[5],
        lambda t: t.split(2)[3],
        lambda t: t.flip(0),
        lambda t: t.sort(0, descending=True).values,
        lambda t: t.argmax(0),
        lambda t: torch.cat([t, t]),
        lambda t: t.tril(),
        lambda t: t.chunk(4)[1],
        lambda t: t.sum(),
        lambda t: t.mean(0),
        lambda t: t + torch.arange(8.0)[:, None],
        lambda t: (t.t() @ t).softmax(-1),
        lambda t: torch.nn.functional.embedding(torch.tensor([0, 7, 3]), t),
    ):
        torch.testing.assert_close(op(x).to_torch(), op(X))


def test_writes_through_views() -> None:
    x, y = dtorch.from_torch(X, MESH, [PACKED]), X.clone()
    for t in (x, y):
        top, bottom = t.chunk(2)
        top.mul_(2)
        bottom[1:3] = 7
        t[4:6].add_(1)
        t[:, 3].zero_()
        t.view(2, 4, 16)[1, 0] = 5
    assert x.placements == [PACKED]
    assert torch.equal(x.to_torch(), y)
    x.copy_(dtorch.from_torch(X, MESH, [Shard(0)]))
    assert torch.equal(x.to_torch(), X)


@pytest.mark.parametrize("where", [[Shard(1), PACKED], [PackedShard(1, 2), Shard(0)]])
def test_writes_through_views_of_another_split_dim(where: Any) -> None:
    x, y = dtorch.from_torch(X, GRID, where), X.clone()
    for t in (x, y):
        t[:, 3].zero_()
        t[:, 1::3] = 4
        t[2].add_(1)
        t[5:7].mul_(2)
    assert x.placements == where
    assert torch.equal(x.to_torch(), y)


def test_random_numbers_do_not_depend_on_it() -> None:
    made = []
    for placement in (PACKED, Shard(0)):
        torch.manual_seed(3)
        x = dtorch.zeros(8, 16, device_mesh=MESH, placements=[placement])
        x.normal_()
        made += [x, dtorch.rand(8, 16, device_mesh=MESH, placements=[placement]), torch.rand_like(x)]
        made.append(torch.nn.functional.dropout(x, 0.5))
    for ours, expected in zip(made[:4], made[4:], strict=True):
        assert torch.equal(ours.to_torch(), expected.to_torch())


def test_files(tmp_path: Path) -> None:
    module = dtorch.distribute_module(Gated(), MESH, {"gate_up.*": [PACKED]})
    dtorch.io.save(module, tmp_path / "a.safetensors", progress=False)
    for plan in ({"gate_up.*": [PACKED]}, {"*": [Shard(0)]}):
        other = dtorch.distribute_module(Gated(), MESH, plan)
        dtorch.io.load(other, tmp_path / "a.safetensors", progress=False)
        for p, expected in zip(other.parameters(), module.parameters(), strict=True):
            assert torch.equal(p.detach().to_torch(), expected.detach().to_torch())
    dtorch.io.save_state(tmp_path / "state", model=module)
    other = dtorch.distribute_module(Gated(), MESH, {"gate_up.*": [PACKED]})
    dtorch.io.load_state(tmp_path / "state", model=other)
    assert torch.equal(other.gate_up.weight.detach().to_torch(), module.gate_up.weight.detach().to_torch())


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="parts must be at least 2, got 1; one part is Shard"):
        PackedShard(0, 1)
    with pytest.raises(TypeError, match="'parts' must be int, not str"):
        PackedShard(0, "2")
    with pytest.raises(ValueError, match=r"cannot be split into 5 parts over 2 devices evenly"):
        dtorch.from_torch(X, MESH, [PackedShard(0, 5)])
    with pytest.raises(ValueError, match="another axis splits dim 0"):
        dtorch.from_torch(X, GRID, [Shard(0), PACKED])
    with pytest.raises(ValueError, match=r"out of range for a 2-d tensor"):
        dtorch.from_torch(X, MESH, [PackedShard(2, 2)])
