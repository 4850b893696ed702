"""Kept copies: what one op needed elsewhere is there for the next, never stale, and not for ever."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint

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


def test_they_go_with_their_value_and_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x = placed(Shard(1))
    x.softmax(1)
    dtorch.synchronize()
    held = dtorch.memory_stats()
    del x
    (placed(Shard(0)) + 1).to_torch()
    dtorch.synchronize()
    assert live(dtorch.memory_stats()) <= live(held)
    monkeypatch.setattr(kept, "YOUNG", 64)
    y = placed(Shard(1))
    y.softmax(1)
    for _ in range(32):
        y + 1
    with dtorch.record() as r:
        y.softmax(1)
    assert not r.communication
    for _ in range(32):
        y + 1
    placed(Shard(1)).softmax(1)
    assert not y._value.kept
    with dtorch.record() as r:
        y.softmax(1)
        y.softmax(1)
    assert len(r.communication) == 2


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)])
def test_they_go_without_a_collection(shape: tuple[int, ...]) -> None:
    """The first call of a plan takes another way than later ones."""
    gc.collect()
    gc.disable()
    try:
        x = dtorch.ones(*shape, device_mesh=MESH, placements=[Shard(1)])
        x.softmax(1)
        copies = [weakref.ref(copy) for copy, _ in x._value.kept.values()]
        del x
        assert [copy() for copy in copies] == [None]
    finally:
        gc.enable()


def test_they_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy that was not used for longest goes first; notes of copies that have gone with their values take no room."""
    size = PLAIN.nbytes
    monkeypatch.setattr(kept, "BYTES", 4 * size)
    monkeypatch.setattr(kept, "COUNT", 8)
    many = [placed(Shard(1)) for _ in range(6)]
    for x in many:
        x.softmax(1)
        many[0].log_softmax(1)
    assert [bool(x._value.kept) for x in many] == [True, False, False, True, True, True]
    for _ in range(20):
        placed(Shard(1)).softmax(1)
    assert many[0]._value.kept
    assert len(kept._gathered._recent) <= 8
    large = dtorch.from_torch(PLAIN.repeat(8, 1), MESH, [Shard(1)])
    torch.testing.assert_close(large.softmax(1).to_torch(), PLAIN.repeat(8, 1).softmax(1))
    assert not large._value.kept


#: Views of all elements, each with where it has dim 1 of its base.
VIEWS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "t": (lambda x: x.t(), 0),
    "permute": (lambda x: x.permute(1, 0), 0),
    "unsqueeze": (lambda x: x.unsqueeze(0), 2),
    "view": (lambda x: x.view(2, 2, 6), 2),
    "a view of a view": (lambda x: x.t().unsqueeze(1).transpose(0, 1), 1),
    "a slice of all": (lambda x: x[:], 1),
}


@pytest.mark.parametrize("placement", [Partial(), Shard(1)], ids=str)
@pytest.mark.parametrize(("take", "dim"), VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("is_first", [False, True], ids=["base first", "view first"])
def test_views_and_base_have_one_copy(
    take: Callable[[torch.Tensor], torch.Tensor], dim: int, placement: dtorch.Placement, is_first: bool
) -> None:
    x = placed(placement)
    view = take(x)
    with dtorch.record() as r:
        found = [] if is_first else [x.softmax(1)]
        found += [view.softmax(dim), view.log_softmax(dim), take(x).softmax(dim), x.softmax(1)]
    assert len(r.communication) == 1
    of_view, of_base = take(PLAIN).softmax(dim), PLAIN.softmax(1)
    expected = [] if is_first else [of_base]
    for one, plain in zip(found, [*expected, of_view, take(PLAIN).log_softmax(dim), of_view, of_base], strict=True):
        assert one.stride() == plain.stride()
        torch.testing.assert_close(one.to_torch(), plain)


@pytest.mark.parametrize("through_view", [False, True])
def test_a_write_voids_the_copy_that_views_have_in_common(through_view: bool) -> None:
    x = placed(Shard(1))
    view = x.t()
    view.softmax(0)
    (view if through_view else x).mul_(0.5)
    torch.testing.assert_close(view.softmax(0).to_torch(), (PLAIN * 0.5).t().softmax(0))
    torch.testing.assert_close(x.softmax(1).to_torch(), (PLAIN * 0.5).softmax(1))


def test_a_view_has_a_copy_when_its_base_is_gone() -> None:
    """Autograd saves views: the copy made for one lives as long as it does, and one made later is its own."""
    x = placed(Shard(1))
    early, late = x.t(), placed(Shard(1)).t()
    early.softmax(0)
    del x
    with dtorch.record() as r:
        early.softmax(0)
        late.softmax(0)
        found = late.softmax(0)
    assert len(r.communication) == 1
    torch.testing.assert_close(found.to_torch(), PLAIN.t().softmax(0))


def test_a_view_of_a_part_brings_only_that() -> None:
    x = placed(Shard(1))
    with dtorch.record() as r:
        x[1:].softmax(1)
    assert r.communication[0].shape == (3, 6)


def test_views_of_parameters_are_not_kept_whole() -> None:
    w = torch.nn.Parameter(placed(Shard(1)))
    view = w.t()
    with dtorch.record() as r:
        view.softmax(0)
        view.softmax(0)
        w[1:].softmax(1)
        w.detach().softmax(1)
    assert len(r.communication) == 4


def train(model: torch.nn.Module, x: torch.Tensor, whole: bool) -> torch.Tensor:
    """A residual split by rows, as tensor parallelism leaves it, through two blocks; the loss."""
    for block in model:
        x = x + (block(x) if whole else torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))
    loss = x.square().mean()
    loss.backward()
    return loss


def blocks() -> torch.nn.Sequential:
    torch.manual_seed(0)
    made = [
        torch.nn.Sequential(
            torch.nn.RMSNorm(32),
            torch.nn.Linear(32, 64, bias=False),
            torch.nn.SiLU(),
            torch.nn.Linear(64, 32, bias=False),
        )
        for _ in range(2)
    ]
    return torch.nn.Sequential(*made)


@pytest.mark.parametrize(("whole", "count"), [(True, 4), (False, 6)], ids=["plain", "checkpointed"])
def test_a_training_step_gathers_each_tensor_once(whole: bool, count: int) -> None:
    """The hidden states in forward, though many ops come before their weights' gradients, and the gradients, whose transposes are needed
    too. What a checkpoint computes anew is brought anew."""
    plain, x = blocks(), torch.randn(8, 32)
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, {"*.1.weight": [Shard(0)], "*.3.weight": [Shard(1)]})
    with dtorch.record() as r:
        loss = train(model, dtorch.distribute_tensor(x, MESH, [Shard(0)]), whole)
    torch.testing.assert_close(loss.to_torch(), train(plain, x, whole))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad)
    gathered = [one for one in r.communication if one.kind == "all_gather"]
    assert len(gathered) == count


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
