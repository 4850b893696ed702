"""Losses and gradients of a pipeline are those of the whole batch on one device in plain torch, in any order of steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch.nn.functional import cross_entropy

import dtorch
from dtorch import Replicate, Shard, pipeline
from dtorch.pipeline import Step, gpipe, one_f_one_b

pytestmark = pytest.mark.usefixtures("engine")

WIDTH, CLASSES, ROWS = 6, 5, 8


def plain_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Embedding(11, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
    return torch.nn.Sequential(
        first, torch.nn.Sequential(torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, CLASSES))
    )


def placed_model(meshes: list[dtorch.DeviceMesh]) -> list[torch.nn.Module]:
    first, second = plain_model()
    plan = {"0.weight": {"tp": Shard(0)}, "1.weight": {"tp": Shard(1)}}
    return [dtorch.distribute_module(first, meshes[0], plan), dtorch.distribute_module(second, meshes[-1], plan)]


def backwards_as_they_come(p: int, m: int) -> Iterable[Step]:
    """An order of one's own: one micro-batch after the other."""
    for i in range(m):
        yield from [Step("forward", 0, i), Step("send_forward", 0, i), Step("forward", 1, i)]
        yield from [Step("backward", 1, i), Step("send_backward", 1, i), Step("backward", 0, i)]


MESHES = {
    "two devices": dtorch.init_device_mesh("cpu", 2, ("pp",)).unbind("pp"),
    "two meshes": dtorch.init_device_mesh("cpu", (2, 2), ("pp", "tp")).unbind("pp"),
    "data parallel": dtorch.init_device_mesh("cpu", (2, 2), ("dp", "pp")).unbind("pp"),
    "meshes that differ": [dtorch.DeviceMesh("cpu", [[0, 1]], ("dp", "tp")), dtorch.DeviceMesh("cpu", [3], ("tp",))],
    "one mesh for both": [dtorch.DeviceMesh("cpu", [0])],
}


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, backwards_as_they_come], ids=lambda f: f.__name__)
@pytest.mark.parametrize("mesh", MESHES)
def test_as_on_one_device(mesh: str, schedule: Callable[[int, int], Iterable[Step]]) -> None:
    m = 4
    meshes = MESHES[mesh]
    ids, classes = torch.arange(ROWS) % 11, torch.arange(ROWS) % CLASSES
    whole = plain_model()
    expected = cross_entropy(whole(ids), classes)
    expected.backward()

    def place(x: torch.Tensor, mesh: dtorch.DeviceMesh) -> list[torch.Tensor]:
        where = [Shard(0) if name == "dp" else Replicate() for name in mesh.mesh_dim_names or [None]]
        return [dtorch.distribute_tensor(part, mesh, where) for part in x.chunk(m)]

    stages = placed_model(meshes)
    losses = pipeline.run(
        schedule(2, m), stages, place(ids, meshes[0]), place(classes, meshes[-1]), lambda *a: cross_entropy(*a) / m
    )
    torch.testing.assert_close(sum(loss.to_torch() for loss in losses), expected.detach())
    for ours, theirs in zip(torch.nn.ModuleList(stages).parameters(), whole.parameters(), strict=True):
        assert ours.grad.placements == ours.placements
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad)


def test_a_whole_model_forward_is_differentiable() -> None:
    ids = torch.arange(ROWS) % 11
    whole = plain_model()
    expected = whole(ids)
    expected.square().sum().backward()
    first, second = stages = placed_model(MESHES["two meshes"])
    out = second(pipeline.to_stage(first(ids), second))
    torch.testing.assert_close(out.detach().to_torch(), expected.detach())
    out.square().sum().backward()
    for ours, theirs in zip(torch.nn.ModuleList(stages).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad)


def test_plain_torch_runs_the_same_loop() -> None:
    whole = plain_model()
    stages = list(copy.deepcopy(whole))
    xs = [torch.arange(4) for _ in range(3)]
    sums = [torch.arange(CLASSES) * 1.0] * 3
    losses = pipeline.run(one_f_one_b(2, 3), stages, xs, sums, lambda out, w: (out * w).sum())
    (whole(torch.cat(xs)) * sums[0]).sum().backward()
    assert len(losses) == 3
    for ours, theirs in zip(torch.nn.ModuleList(stages).parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_loop_of_ones_own() -> None:
    """The helpers alone, in an order that no schedule has: backward of the last micro-batch first."""
    first, second = placed_model(MESHES["two meshes"])
    whole = plain_model()
    batches = [torch.tensor([1, 2, 3, 3]), torch.tensor([4, 5, 6, 0])]
    kept = []
    for ids in batches:
        made = first(ids)
        given = pipeline.stage_input(made, second)
        assert given.is_leaf
        assert given.requires_grad
        assert given.device_mesh == MESHES["two meshes"][1]
        kept.append((made, given, second(given).square().sum()))
    for made, given, loss in reversed(kept):
        grad = pipeline.stage_backward(loss, input=given)
        assert given.grad is None
        assert pipeline.stage_backward(made, pipeline.send_backward(grad, made)) is None
    sum(whole(ids).square().sum() for ids in batches).backward()
    for ours, theirs in zip([*first.parameters(), *second.parameters()], whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad)
