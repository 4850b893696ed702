"""What torch makes or refuses by itself, where dtorch cannot see it being made."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard


@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
def test_a_gradient_that_torch_makes_itself_lies_where_its_leaf_does(engine: str, layout: object) -> None:
    """For an empty tensor in a cat it makes zeros of its own (2.13)."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x = dtorch.distribute_tensor(torch.rand(0), mesh, [layout]).requires_grad_()
    torch.cat([x, x * 2], -1).sum().backward()
    assert x.grad.placements == x.placements
    assert x.grad.to_torch().shape == (0,)


@pytest.mark.parametrize("layout", [Replicate(), Shard(0)])
def test_one_class_index_with_a_dim(engine: str, layout: object) -> None:
    """torch's CPU kernel takes it and its meta kernel does not."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    scores, target = torch.rand(6), torch.tensor([2])
    x = dtorch.distribute_tensor(scores, mesh, [layout])
    found = torch.nn.functional.cross_entropy(x, dtorch.from_torch(target, mesh))
    torch.testing.assert_close(found.to_torch(), torch.nn.functional.cross_entropy(scores, target))
