"""Ops for which torch has a formula and a kernel run as the kernel: one op, with torch's bits, to any order of gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import mish, silu

import dtorch
from dtorch import Shard

SHAPE = (8, 32)  # whole vectors on each device: kernels treat what is left over in another way


def _second(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(function(x).sin().sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(gradient.square().sum(), x)
    return found


@pytest.mark.parametrize("function", [silu, mish])
def test_a_gradient_with_a_kernel_is_one_op(engine: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    plain, gradient = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE)
    x = dtorch.distribute_tensor(plain.detach(), mesh, [Shard(0)]).requires_grad_()
    function(plain).backward(gradient)
    with dtorch.record() as r:
        function(x).backward(dtorch.distribute_tensor(gradient, mesh, [Shard(0)]))
    name = function.__name__
    assert [op.name for op in r.ops] == [f"aten.{name}.default", f"aten.{name}_backward.default"]
    assert plain.grad is not None
    assert x.grad is not None
    assert torch.equal(x.grad.to_torch(), plain.grad)
    torch.testing.assert_close(_second(function, x).to_torch(), _second(function, plain))
