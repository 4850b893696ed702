"""Arguments that are views taken of a redistributed copy, as a batch sliced from rows that are split is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Shard

from .same import MESH, captured, close, placed

pytestmark = pytest.mark.usefixtures("simulated")

X = torch.arange(24.0).reshape(6, 4) / 7
W = torch.arange(16.0).reshape(4, 4) / 5 - 1

#: Views of six rows of four columns.
TAKEN: list[Callable[[Any], Any]] = [
    lambda x: x[1:3],
    lambda x: x[5],
    lambda x: x[::2].t(),
    lambda x: x.view(2, 3, 4)[:, 1],
]


@pytest.mark.parametrize("take", TAKEN)
@torch.no_grad()
def test_it_is_captured_and_follows_its_base(take: Any) -> None:
    compiled = dtorch.compile(lambda s: (s * 2).sum(0) + s.mean())
    x, plain = placed(X, Shard(0)), X.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(compiled(take(x)), compiled.function(take(plain)))
        found = take(x)
        close(captured(compiled, found), compiled.function(take(plain)))
        for tensor in (x, plain):
            tensor.mul_(3)
        close(compiled(found), compiled.function(take(plain)))
        close(compiled(found), compiled.function(take(plain)))
        for tensor in (x, plain):
            take(tensor).add_(1)
        close(compiled(found), compiled.function(take(plain)))
        close(compiled(found.clone()), compiled.function(take(plain)))
    close(x, plain)


def test_batches_of_a_training_step() -> None:
    model, plain = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    dtorch.distribute_module(model, MESH, {})

    def step_of(module: torch.nn.Module) -> Callable[[Any], Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

        def step(batch: Any) -> Any:
            optimizer.zero_grad()
            loss = module(batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        return step

    x = placed(X, Shard(0))
    ours, theirs = dtorch.compile(step_of(model)), step_of(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in (0, 2, 4, 1, 3):
            close(ours(x[first : first + 2]), theirs(X[first : first + 2]))
    captured(ours, x[:2])
    theirs(X[:2])
    close(model.weight, plain.weight)


def test_gradients_outside() -> None:
    weight, plain = placed(W).requires_grad_(), W.clone().requires_grad_()
    x, rows = placed(X, Shard(0)), X.clone()
    compiled = dtorch.compile(lambda s, w: (s @ w).square().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for take in (lambda x: x[:2], lambda x: x[1:3], lambda x: x[:2].clone(), lambda x: x[2:4]):
            compiled(take(x), weight).backward()
            compiled.function(take(rows), plain).backward()
            close(weight.grad, plain.grad)
        loss = compiled(x[1:3], weight)
        x[0, 0] = 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize(
    "function",
    [
        lambda s: s.add_(1).sum(),
        lambda s: s.view(-1)[1:],
        lambda s: s[0].zero_() + 1,
    ],
)
@torch.no_grad()
def test_what_is_written_or_returned_runs_op_by_op(function: Any) -> None:
    compiled = dtorch.compile(lambda s: function(s))
    x, plain = placed(X, Shard(0)), X.clone()
    with pytest.warns(UserWarning, match=r"give a clone\(\) of it"):
        close(compiled(x[1:3]), function(plain[1:3]))
    found = compiled(x[2:4])
    expected = function(plain[2:4])
    close(found, expected)
    close(x, plain)
    if found.ndim:
        for tensor in (found, expected):
            tensor.sub_(5)
        close(x, plain)


@torch.no_grad()
def test_the_argument_itself_is_returned() -> None:
    compiled = dtorch.compile(lambda s: (s.sum(), s)[1])
    x = placed(X, Shard(0))
    for first in (0, 1, 2):
        given = x[first : first + 2]
        assert compiled(given) is given


@torch.no_grad()
def test_recorded_with_a_tensor_of_its_own() -> None:
    """What is written is not the same memory when it is recorded, and is in a later call."""

    def function(x: Any, s: Any) -> Any:
        x.add_(1)
        return s * 2

    compiled = dtorch.compile(function)
    x, plain = placed(X, Shard(0)), X.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for take in (lambda x: x[1:3].clone(), lambda x: x[1:3], lambda x: x[1:3].clone(), lambda x: x[2:4]):
            ours, theirs = take(x), take(plain)
            for _ in range(2):
                close(compiled(x, ours), function(plain, theirs))
                close(x, plain)
                close(ours, theirs)


@torch.no_grad()
def test_kept_by_a_module() -> None:
    class Rows(torch.nn.Module):
        def forward(self, y: Any) -> Any:
            return y + self.rows

    module, x, plain = Rows(), placed(X, Shard(0)), X.clone()
    module.rows = x[1:3]
    compiled = dtorch.compile(module)
    with pytest.warns(UserWarning, match=r"give a clone\(\) of it"):
        close(compiled(placed(X[:2])), X[:2] + plain[1:3])
    for tensor in (x, plain):
        tensor.mul_(2)
    close(compiled(placed(X[:2])), X[:2] + plain[1:3])
