"""What planning knows of an op from its schema and its kernels."""

from __future__ import annotations

import pytest
import torch

from dtorch.sharding.rules import rule_for
from dtorch.sharding.schema import OpInfo

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten.silu_backward.default, aten.mish_backward.default])
def test_an_op_with_a_kernel_beside_its_formula_is_not_taken_apart(op: torch._ops.OpOverload) -> None:
    """The formula would round otherwise, and be eight ops."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    assert not OpInfo(op).is_composite
    assert rule_for(op) is not None


@pytest.mark.parametrize("op", [aten.matmul.default, aten.linear.default, aten.layer_norm.default])
def test_an_op_without_one_is(op: torch._ops.OpOverload) -> None:
    assert OpInfo(op).is_composite
