"""What every way of running a program on tensors keeps to: `sync`, the end of a cluster, meshes that differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dtorch
from dtorch.errors import DTorchError

WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "an op": lambda x: x + x,
    "a view": lambda x: x.t(),
    "an op in place": lambda x: x.add_(1),
    "a redistribution": lambda x: x.redistribute(placements=[dtorch.Replicate()]),
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(2, 2, 2, 2)] * 3),
    "a random op": lambda x: torch.nn.functional.dropout(x),
    "a draw on whole inputs": lambda x: torch.multinomial(x.abs() + 1, 1),
    "sizes that values decide": lambda x: x.nonzero(),
    "a captured call": lambda x: _captured(x),
}
_captured = dtorch.compile(lambda x: x * 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_a_cluster_that_has_ended_is_refused(way: str) -> None:
    for _ in range(2):
        dtorch.shutdown()
        dtorch.init(engine="simulate")
        mesh = dtorch.DeviceMesh("cpu", [0, 1])
        x = dtorch.ones(4, 4, device_mesh=mesh, placements=[dtorch.Shard(0)])
        WAYS[way](x)
        dtorch.shutdown()
        dtorch.init(engine="simulate")
        dtorch.ones(2, device_mesh=mesh).sum().item()
        with pytest.raises(DTorchError, match="shut down"):
            WAYS[way](x)
    dtorch.shutdown()


@pytest.mark.parametrize("way", WAYS)
def test_sync_waits_after_every_way(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtorch.client.controller import Controller

    dtorch.shutdown()
    dtorch.init(engine="simulate", sync=True)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.ones(4, 4, device_mesh=mesh, placements=[dtorch.Shard(0)])
    WAYS[way](x)
    waited = []
    synchronize = Controller.synchronize
    monkeypatch.setattr(Controller, "synchronize", lambda self: (waited.append(1), synchronize(self))[1])
    WAYS[way](x)
    # Sizes that values decide are waited for in any case.
    assert waited or way == "sizes that values decide"
    dtorch.shutdown()


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_one_optimizer_over_several_meshes(engine: str, kind: type, foreach: bool | None) -> None:
    """A pipeline's stages have meshes of their own, and an optimizer's list ops get them all."""
    torch.manual_seed(0)
    plain = [torch.rand(4, 3) for _ in range(4)]
    grads = [torch.rand(4, 3) for _ in range(4)]
    meshes = [dtorch.DeviceMesh("cpu", [0]), dtorch.DeviceMesh("cpu", [1])]

    def train(place: Callable[[torch.Tensor, int], torch.Tensor]) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(place(p.clone(), i)) for i, p in enumerate(plain)]
        optimizer = kind(parameters, lr=0.1, weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            for i, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
                parameter.grad = place(grad.clone(), i)
            torch.nn.utils.clip_grad_value_(parameters, 0.5)
            optimizer.step()
        return [p.detach() for p in parameters]

    expected = train(lambda t, i: t)
    found = train(lambda t, i: dtorch.distribute_tensor(t, meshes[i % 2], [dtorch.Replicate()]))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_torch(), theirs)
