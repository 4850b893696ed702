"""Gradients that come from, or go, outside of a captured call: captured right, or run op by op."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtorch

from .same import placed

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("ignore:dtorch.compile")]

W = torch.arange(4.0) - 1.5
Place = Callable[[torch.Tensor], Any]


def leaf_argument(place: Place, wrap: Any) -> Iterator[Any]:
    function = wrap(lambda x: (x * x).sum().backward())
    for i in range(3):
        x = place(W + i).requires_grad_()
        function(x)
        yield x.grad


def argument_with_a_graph(place: Place, wrap: Any) -> Iterator[Any]:
    w = place(W).requires_grad_()
    function = wrap(lambda h: h.square().sum().backward())
    for _ in range(3):
        function(w * 2)
        yield w.grad


def replaced_parameter(place: Place, wrap: Any) -> Iterator[Any]:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(place(W))
    function = wrap(lambda x: (module.w * x).square().sum().backward())
    for i in range(5):
        if i == 3:
            module.w = torch.nn.Parameter(place(W + 7))
        function(place(W + i))
        yield module.w.grad


def of_one_another(place: Place, wrap: Any) -> Iterator[Any]:
    """Inputs of which one was computed from another outside: its gradient is part of the other's already."""
    for make in (lambda x: x[:2], lambda x: x * 2, lambda x: x.clone(), lambda x: (x * 3).view(2, 2).t()[0]):
        function = wrap(lambda x, s: (x.sum() * s).sum())
        for i in range(3):
            x = place(W + i).requires_grad_()
            function(x, make(x)).backward()
            yield x.grad
            h = x.exp()
            function(h, make(h)).backward()
            yield x.grad


def of_one_another_at_last(place: Place, wrap: Any) -> Iterator[Any]:
    """Recorded where none was computed from another."""
    function = wrap(lambda x, s: (x.sum() * s).sum())
    for i in range(4):
        x = place(W + i).requires_grad_()
        function(x, place(W * 2).requires_grad_() * 1 if i < 2 else x * 2).backward()
        yield x.grad


def of_a_parameter(place: Place, wrap: Any) -> Iterator[Any]:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(place(W))
    function = wrap(lambda h: (module.w * h).sum())
    for _ in range(3):
        function(module.w * 2).backward()
        yield module.w.grad


def of_one_tensor(place: Place, wrap: Any) -> Iterator[Any]:
    """Parts of what neither is: each has a gradient of its own."""
    function = wrap(lambda a, b: (a * b.square()).sum())
    for i in range(3):
        x = place(W + i).requires_grad_()
        function(*(x * 1).chunk(2)).backward()
        yield x.grad
        function(x[:2], x[1:3]).backward()
        yield x.grad


def undefined_gradient(place: Place, wrap: Any) -> Iterator[Any]:
    function = wrap(lambda x: (x.sqrt(), x * 2))
    for _ in range(3):
        x = place(torch.tensor([0.0, 1.0])).requires_grad_()
        function(x)[1].sum().backward()
        yield x.grad


def a_gradient_that_was_absent(place: Place, wrap: Any) -> Iterator[Any]:
    p, q = place(W).requires_grad_(), place(W + 1).requires_grad_()
    optimizer = torch.optim.SGD([p, q], lr=0.1)
    function = wrap(lambda: optimizer.step())
    for i in range(4):
        p.grad, q.grad = place(W + i), place(W) if i == 3 else None
        function()
        yield p + 0
        yield q + 0


def former_gradient(place: Place, wrap: Any) -> Iterator[Any]:
    w = place(W).requires_grad_()
    w.grad = place(W + 9)

    def step(x: Any) -> Any:
        former, w.grad = w.grad, None
        (w * x).sum().backward()
        return former

    function = wrap(step)
    for i in range(4):
        yield function(place(W + i))


def written_view(place: Place, wrap: Any) -> Iterator[Any]:
    function = wrap(lambda y: y.view(2, 2))
    for i in range(3):
        x = place(W + i).requires_grad_()
        y = x * 1
        function(y).mul_(3)
        y.sum().backward()
        yield x.grad


def retained(place: Place, wrap: Any) -> Iterator[Any]:
    """Gradients that `retain_grad` keeps, of what a call is given, returns, and makes."""

    def made(x: Any) -> Any:
        h = x * 2
        h.retain_grad()
        return h, h.square().sum()

    x = place(W).requires_grad_()
    of_given, of_made = wrap(lambda h: h.square()), wrap(made)
    for i in range(3):
        given = (x * (i + 1)).t()
        given.retain_grad()
        for _ in range(2):
            returned = of_given(given)
            returned.retain_grad()
            returned.sum().backward(retain_graph=True)
            yield given.grad
            yield returned.grad
        h, total = of_made(x)
        total.backward()
        yield h.grad
        yield x.grad


CASES = [
    leaf_argument, argument_with_a_graph, replaced_parameter, of_one_another, of_one_another_at_last, of_a_parameter, of_one_tensor,
    undefined_gradient, a_gradient_that_was_absent, former_gradient, written_view, retained,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_same_as_plain_torch(case: Any) -> None:
    expected = [t.detach().clone() for t in case(lambda t: t.clone(), lambda function: function)]
    found = [t.detach().to_torch().clone() for t in case(placed, dtorch.compile)]
    torch.testing.assert_close(found, expected)


def test_a_gradient_that_is_differentiated_again() -> None:
    function = dtorch.compile(lambda x: (x**3).sum())
    for _ in range(3):
        x, plain = placed(W).requires_grad_(), W.clone().requires_grad_()
        (found,) = torch.autograd.grad(function(x), x, create_graph=True)
        (expected,) = torch.autograd.grad((plain**3).sum(), plain, create_graph=True)
        torch.testing.assert_close(found.detach().to_torch(), expected.detach())
        with pytest.raises(RuntimeError, match=r"dtorch\.compile captured, cannot be differentiated again: call"):
            (function(x) + (found**2).sum()).backward()


def test_plain_leaves_get_their_gradients() -> None:
    """As arguments, in a closure, and in a plain module: such calls run op by op, for a program knows of no gradient of theirs."""
    weight, module = W.clone().requires_grad_(), torch.nn.Linear(4, 2)
    cases = (
        (lambda x, w: (x @ w).sin().sum(), (weight,), [weight]),
        (lambda x: (x @ (weight * 2)).sin().sum(), (), [weight]),
        (lambda x: module(x).sin().sum(), (), list(module.parameters())),
    )
    for function, others, leaves in cases:
        compiled = dtorch.compile(function)
        for call in range(3):
            found = []
            for run, x in ((function, W.clone()), (compiled, placed(W))):
                for leaf in leaves:
                    leaf.grad = None
                if run is compiled and not call:
                    with pytest.warns(UserWarning, match="a plain tensor requires gradients: place it with"):
                        run(x, *others).backward()
                else:
                    run(x, *others).backward()
                found.append([leaf.grad for leaf in leaves])
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(other.to_torch(), one)
