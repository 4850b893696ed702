"""Writes in place through views, inside a captured call, reach what they are views of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

from .same import captured, placed

pytestmark = pytest.mark.usefixtures("engine")


def through(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def function(x: Any) -> Any:
        y = x * 1
        view(y).mul_(3)
        return y

    return function


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)])
@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.split(2)[1],
        lambda y: y.chunk(2)[0],
        lambda y: y.unbind(0)[1],
        lambda y: y.tensor_split(2)[0],
        lambda y: torch.ops.aten._unsafe_view(y, [6, 4]),
        lambda y: y.view(2, 3, 4)[1],
        lambda y: torch.broadcast_tensors(y, y[:1])[0],
    ],
    ids=["split", "chunk", "unbind", "tensor_split", "_unsafe_view", "view", "broadcast_tensors"],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_write_through_a_view(view: Callable[[Any], Any], placement: Any, mode: Any) -> None:
    function = through(view)
    compiled = dtorch.compile(function)
    x = torch.arange(24.0).view(6, 4)
    with mode():
        ours = placed(x, placement)
        for _ in range(2):
            assert torch.equal(compiled(ours).to_torch(), function(x))
        assert torch.equal(captured(compiled, ours).to_torch(), function(x))


def test_statistics_of_a_batch_norm_whose_result_nobody_wants() -> None:
    plain = torch.nn.BatchNorm1d(4)
    ours = dtorch.distribute_module(torch.nn.BatchNorm1d(4), placed(torch.zeros(1)).device_mesh, {})
    x = torch.arange(24.0).view(6, 4)

    def function(norm: Any, x: Any) -> Any:
        norm(x)
        return x + 1

    compiled = dtorch.compile(lambda x: function(ours, x))
    for _ in range(3):
        assert torch.equal(compiled(placed(x)).to_torch(), function(plain, x))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(ours, name).to_torch(), getattr(plain, name))
