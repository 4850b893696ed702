"""Redistribute: any placements on any mesh to any placements on any other, and its gradient."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard

pytestmark = pytest.mark.usefixtures("engine")

GRIDS = [
    [0],
    [3],
    [0, 1],
    [1, 0],
    [2, 3],
    [0, 1, 2],
    [3, 1, 0, 2],
    [[0, 1], [2, 3]],
    [[3, 2], [1, 0]],
    [[0, 2]],
    [[[0, 1], [2, 3]]],
]


def axes_of(grid: Any) -> int:
    return torch.tensor(grid).ndim


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    source, target = draw(st.sampled_from(GRIDS)), draw(st.sampled_from(GRIDS))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=0, max_size=3)))
    one = st.sampled_from([Replicate(), Partial(), *[Shard(d) for d in range(-len(shape), len(shape))]])
    where = [draw(st.lists(one, min_size=axes_of(g), max_size=axes_of(g))) for g in (source, target)]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.float64]))
    return source, where[0], target, where[1], shape, dtype


relaxed = hypothesis.settings(
    max_examples=120, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@hypothesis.given(case=cases())
@relaxed
def test_values_move_unchanged(case: Any) -> None:
    source, where, target, there, shape, dtype = case
    plain = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    x = dtorch.distribute_tensor(plain, DeviceMesh("cpu", source), where)
    y = x.redistribute(DeviceMesh("cpu", target), there)
    assert y.device_mesh == DeviceMesh("cpu", target)
    assert y.shape == plain.shape
    assert y.dtype == dtype
    assert torch.equal(y.to_torch(), plain)
    assert torch.equal(x.to_torch(), plain)


@hypothesis.given(case=cases())
@relaxed
def test_a_pending_sum_of_many_addends_moves_too(case: Any) -> None:
    source, _, target, there, shape, _ = case
    if not shape or 0 in shape:
        return
    torch.manual_seed(0)
    plain = torch.randn(6, *shape)
    x = dtorch.distribute_tensor(plain, DeviceMesh("cpu", source), [Shard(0)] * axes_of(source))
    summed = x.sum(0).redistribute(DeviceMesh("cpu", target), there)
    torch.testing.assert_close(summed.to_torch(), plain.sum(0))


@hypothesis.given(case=cases())
@relaxed
def test_gradient_is_that_of_the_identity(case: Any) -> None:
    source, where, target, there, shape, _ = case
    torch.manual_seed(0)
    plain, weight = torch.randn(shape), torch.randn(shape)
    x = dtorch.distribute_tensor(plain, DeviceMesh("cpu", source), where).requires_grad_()
    y = x.redistribute(DeviceMesh("cpu", target), there)
    scale = dtorch.distribute_tensor(weight, DeviceMesh("cpu", target), [Replicate()] * axes_of(target))
    (y * scale).sum().backward()
    torch.testing.assert_close(x.grad.to_torch(), weight)


def test_the_result_does_not_alias_the_source() -> None:
    plain = torch.randn(4, 4)
    x = dtorch.distribute_tensor(plain, DeviceMesh("cpu", [0, 1]), [Replicate()])
    y = x.redistribute(placements=[Shard(0)])
    y.add_(1)
    assert torch.equal(x.to_torch(), plain)


def test_where_it_is_already_is_the_tensor_itself() -> None:
    x = dtorch.distribute_tensor(torch.randn(4), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    assert x.redistribute(placements=[Shard(-1)]) is x
