"""Kept copies: what one op needed elsewhere is there for the next, never stale, and not for ever."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Shard
from dtorch.client import kept

pytestmark = pytest.mark.usefixtures("engine")

MESH = DeviceMesh("cpu", [0, 1])
PLAIN = torch.arange(24.0).reshape(4, 6)


def placed(placement: dtorch.Placement) -> dtorch.Tensor:
    return dtorch.from_torch(PLAIN, MESH, [placement])


@pytest.mark.parametrize("placement", [Partial(), Shard(1)], ids=str)
def test_the_second_op_moves_nothing(placement: dtorch.Placement) -> None:
    x = placed(placement)
    with dtorch.record() as r:
        first, second = x.softmax(1), x.log_softmax(1)
    assert len(r.communication) == 1
    torch.testing.assert_close(first.to_torch(), PLAIN.softmax(1))
    torch.testing.assert_close(second.to_torch(), PLAIN.log_softmax(1))
    assert x.placements == [placement]


@pytest.mark.parametrize("placement", [Partial(), Shard(1)], ids=str)
def test_a_write_voids_it(placement: dtorch.Placement) -> None:
    x = placed(placement)
    x.softmax(1)
    x[1:, ::2].add_(2)
    plain = PLAIN.clone()
    plain[1:, ::2].add_(2)
    torch.testing.assert_close(x.softmax(1).to_torch(), plain.softmax(1))
    x.data.mul_(0.5)
    torch.testing.assert_close(x.softmax(1).to_torch(), (plain * 0.5).softmax(1))


def test_a_write_through_a_view_of_the_source_voids_the_copy_of_another_view() -> None:
    x = placed(Shard(1))
    view, other = x[1:], x[:, 1:]
    view.softmax(1)
    other.add_(1)
    plain = PLAIN.clone()
    plain[:, 1:].add_(1)
    torch.testing.assert_close(view.softmax(1).to_torch(), plain[1:].softmax(1))


def test_in_place_ops_write_the_tensor_and_not_a_copy() -> None:
    x = placed(Shard(1))
    x.softmax(1)
    x.cumsum_(1)
    torch.testing.assert_close(x.to_torch(), PLAIN.cumsum(1))


def test_parameters_are_not_kept_whole() -> None:
    w = torch.nn.Parameter(placed(Shard(1)))
    with dtorch.record() as r:
        w.softmax(1)
        w.softmax(1)
    assert len(r.communication) == 2


def live(stats: dict[torch.device, dict[str, int]]) -> int:
    return sum(device["live"] for device in stats.values())


def test_they_go_with_their_value_and_with_time() -> None:
    x = placed(Shard(1))
    x.softmax(1)
    dtorch.synchronize()
    held = dtorch.memory_stats()
    del x
    (placed(Shard(0)) + 1).to_torch()
    dtorch.synchronize()
    assert live(dtorch.memory_stats()) <= live(held)
    y = placed(Shard(1))
    y.softmax(1)
    for _ in range(kept.AGE):
        y + 1
    placed(Shard(1)).softmax(1)
    with dtorch.record() as r:
        y.softmax(1)
    assert len(r.communication) == 1


def test_a_sum_that_was_needed_once_stays_done() -> None:
    """A residual stream: its norm has had the sum, so what is added to it next need not leave it pending."""
    x = dtorch.from_torch(torch.ones(4, 4), MESH, [dtorch.Partial()])
    whole = dtorch.from_torch(torch.full((4, 4), 2.0), MESH)
    with dtorch.record() as r:
        normed = x.square()
        y = x + whole
        assert torch.equal((y.square() + normed).to_torch(), torch.full((4, 4), 10.0))
    assert [one.kind for one in r.communication] == ["all_reduce"]
    assert y.placements == [dtorch.Replicate()]
    x.add_(whole)
    assert torch.equal((x + whole).to_torch(), torch.full((4, 4), 5.0))


def test_gradients_are_those_of_one_device() -> None:
    plain = PLAIN.clone().requires_grad_()
    (plain.softmax(1) * plain.log_softmax(1)).sum().backward()
    for placement in (Partial(), Shard(0), Shard(1)):
        x = dtorch.from_torch(PLAIN, MESH, [placement]).requires_grad_()
        y = x * 1
        (y.softmax(1) * y.log_softmax(1)).sum().backward()
        torch.testing.assert_close(x.grad.to_torch(), plain.grad)
