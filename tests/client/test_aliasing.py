"""Views alias, however their base is sharded: random sequences of views and in-place ops against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard
from dtorch.client import aliasing
from dtorch.errors import RemoteError
from dtorch.program.ir import Slot

from .same import every_layout, same

pytestmark = pytest.mark.usefixtures("engine")

MESHES = {"2": [0, 1], "3": [0, 1, 2], "2x2": [[0, 1], [2, 3]]}

View = Callable[[torch.Tensor, int], torch.Tensor]

VIEWS: dict[str, View] = {
    "select0": lambda x, n: x[n % x.shape[0]],
    "select-1": lambda x, n: x[..., n % x.shape[-1]],
    "slice0": lambda x, n: x[n % x.shape[0] :],
    "slice-1": lambda x, n: x[..., : n % x.shape[-1] + 1],
    "step": lambda x, n: x[:: n % 2 + 1],
    "transpose": lambda x, n: x.transpose(0, -1),
    "unsqueeze": lambda x, n: x.unsqueeze(n % (x.ndim + 1)),
    "flatten": lambda x, n: x.view(-1) if x.is_contiguous() else x,
    "split": lambda x, n: x.split(2)[n % len(x.split(2))],
    "unbind": lambda x, n: x.unbind(0)[n % x.shape[0]],
    "detach": lambda x, n: x.detach(),
    "diagonal": lambda x, n: x.diagonal() if x.ndim > 1 else x,
    "data": lambda x, n: x.data,
}

WRITES: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "add_": lambda x, n: x.add_(n),
    "mul_": lambda x, n: x.mul_(2.0),
    "fill_": lambda x, n: x.fill_(n),
    "copy_": lambda x, n: x.copy_(torch.full(tuple(x.shape), float(n))),
    "setitem": lambda x, n: x.__setitem__(0, float(n)),
    "setslice": lambda x, n: x.__setitem__((..., slice(0, 1)), float(n)),
    "setmask": lambda x, n: x.__setitem__(x > n, 1.0),
    "relu_": lambda x, n: x.relu_(),
    "zero_": lambda x, n: x.zero_(),
    "masked_fill_": lambda x, n: x.masked_fill_(x > n, 0.5),
}


def placements(axes: int, dims: int) -> st.SearchStrategy[list[Any]]:
    one = st.sampled_from([Replicate(), Partial(), *[Shard(d) for d in range(dims)]])
    return st.lists(one, min_size=axes, max_size=axes)


@st.composite
def cases(draw: Any) -> tuple[str, list[Any], tuple[int, ...], list[tuple[str, int, int]]]:
    mesh = draw(st.sampled_from(sorted(MESHES)))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    where = draw(placements(2 if mesh == "2x2" else 1, len(shape)))
    step = st.tuples(st.sampled_from([*VIEWS, *WRITES]), st.integers(0, 7), st.integers(0, 7))
    return mesh, where, shape, draw(st.lists(step, min_size=2, max_size=7))


@hypothesis.given(case=cases())
@hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_sequences_of_views_and_writes(case: Any) -> None:
    mesh, where, shape, steps = case
    plain = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    ours = dtorch.distribute_tensor(plain.clone(), dtorch.DeviceMesh("cpu", MESHES[mesh]), where)
    left, right = [plain], [ours]
    for name, which, n in steps:
        a, b = left[which % len(left)], right[which % len(right)]
        if a.ndim == 0 or a.numel() == 0:
            continue
        if name in VIEWS:
            left.append(VIEWS[name](a, n))
            right.append(VIEWS[name](b, n))
            assert right[-1].shape == left[-1].shape
            assert right[-1].stride() == left[-1].stride() or left[-1].numel() < 2
        else:
            WRITES[name](a, n)
            WRITES[name](b, n)
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(b.to_torch(), a)


def _twice(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch._foreach_add_([x, x], 1)
    return x


def _beside_a_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch._foreach_mul_([x, x[0], x[:, 1]], [2.0, 3.0, 5.0])
    return x


def _in_a_cycle(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch._foreach_add_([x, y], [y, x.detach()], alpha=2)
    return x, y


def _transposed(x: torch.Tensor, y: torch.Tensor) -> Any:
    torch._foreach_exp_([x, x.t()])
    return x


def _through_data(x: torch.Tensor, y: torch.Tensor) -> Any:
    y.data = x.data
    torch._foreach_addcmul_([x, y], [y, x], [x.clone(), x.clone()], value=0.5)
    return x, y


@every_layout
@pytest.mark.parametrize("program", [_twice, _beside_a_view, _in_a_cycle, _transposed, _through_data])
def test_lists_whose_tensors_share_memory(program: Callable[..., Any], layout: str) -> None:
    """torch writes them one after the other."""
    same(program, layout, torch.arange(9.0).view(3, 3) / 4, torch.arange(9.0, 18.0).view(3, 3) / 8)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "same_tensor",
    [
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: torch.nn.functional.dropout(x, 0.5, False),
        lambda x: torch.nn.functional.dropout(x, 0.0, True),
        lambda x: torch.feature_dropout(x, 0.5, False),
        lambda x: torch.alpha_dropout(x, 0.5, False),
        lambda x: x.contiguous(),
        lambda x: x.to(x.dtype),
        lambda x: x.reshape(4, 4),
        lambda x: torch.real(x),
        lambda x: torch.atleast_2d(x),
    ],
)
def test_what_torch_gives_back_as_it_is(mode: Any, same_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with mode():
        plain = torch.ones(4, 4)
        x = dtorch.distribute_tensor(plain, dtorch.DeviceMesh("cpu", [0, 1]), [Shard(0)])
        found, expected = same_tensor(x), same_tensor(plain)
        found += 1
        expected += 1
        same(x, plain)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_write_that_does_not_reach_the_base_is_nobodys(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that should have agreed may be read, wherever on the way from the copy of a copy it failed."""
    write, calls = aliasing._write_slice, []

    def fail(builder: Any, *rest: Any) -> None:
        calls.append(builder)
        if len(calls) == failing:
            builder.op("aten.view.default", [Slot(0), [-7]], [builder.slot()])
        write(builder, *rest)

    monkeypatch.setattr(aliasing, "_write_slice", fail)
    x = dtorch.distribute_tensor(torch.ones(4, 4), dtorch.DeviceMesh("cpu", MESHES["2x2"]), [Shard(0), Shard(1)])
    other = x.clone()
    row = x[1]
    element = row[2]
    element.fill_(5)
    assert len(calls) == 2
    for alias in (element, element.view(1), row, row[1:], x, x.t(), x[0], x[1, 2]):
        with pytest.raises(RemoteError, match="invalid shape"):
            alias.to_torch()
    assert other.sum().item() == 16
