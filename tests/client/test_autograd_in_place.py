"""Autograd through in-place ops and views: written through local views and through redistributed ones, refused where torch refuses."""

from __future__ import annotations

from typing import Any

import torch

from .same import each, every_engine, every_layout, same

pytestmark = [every_engine, every_layout]

X = torch.linspace(-2, 2, 24).reshape(4, 6).requires_grad_()
W = torch.linspace(1, -1, 24).reshape(4, 6).cos().requires_grad_()
DATA = torch.linspace(0, 3, 24).reshape(4, 6).sin()


def leaf_in_place_under_no_grad(x: Any, w: Any) -> Any:
    with torch.no_grad():
        x.add_(1)
        x[0].zero_()
        x[:, 1] = 7
        w.copy_(x)
    (x * w).sum().backward()
    return x, w, x.grad, w.grad


def leaf_in_place_refused(x: Any, w: Any) -> Any:
    x.add_(1)


def leaf_view_in_place_refused(x: Any, w: Any) -> Any:
    x[0].add_(1)


def setitem_on_a_result(x: Any, w: Any) -> Any:
    y = x * 2
    y[1] = w[0]
    y[:, 2] = 5
    y[0, 0] *= w[1, 1]
    (y * y).sum().backward()
    return y, x.grad, w.grad


def writes_through_views(x: Any, w: Any) -> Any:
    y = x.clone()
    y[1].mul_(w[2])
    y.t()[3].add_(w[:, 0])
    y[:, 1:4].sin_()
    y[2:].transpose(0, 1)[1].mul_(3)
    y.view(-1)[5:9].exp_()
    y.diagonal().mul_(w[0, :4])
    y.unbind(1)  # no write through a multi-output view
    y.sum().backward()
    return y, x.grad, w.grad


def view_made_before_the_write(x: Any, w: Any) -> Any:
    y = x.clone()
    view = y[1:3, 2]
    y.mul_(w)
    view.add_(1)
    (view * 3).sum().backward()
    return view, y, x.grad, w.grad


def view_chain(x: Any, w: Any) -> Any:
    y = x * 1
    a = y[:, 1:]
    b = a.t()
    c = b[2:4]
    c.mul_(w[:, :2].t())
    (y.sum() + (a * a).sum() + b.exp().sum()).backward()
    return a, b, c, x.grad, w.grad


def index_put_and_masks(x: Any, w: Any) -> Any:
    y = x * 1
    y[y > 0.5] = 0
    y[torch.tensor([0, 3])] = w[:2]
    y.masked_fill_(w > 0.5, 2.0)
    y[torch.tensor([1, 2]), torch.tensor([0, 5])] += w[0, 0]
    y.index_add_(0, torch.tensor([1]), w[:1])
    y.scatter_(1, torch.zeros(4, 1, dtype=torch.long), w[:, :1])
    y.sum().backward()
    return y, x.grad, w.grad


def split_views_refused(x: Any, w: Any) -> Any:
    y = x * 1
    y.unbind(1)[0].mul_(2)


def chunk_then_write_base(x: Any, w: Any) -> Any:
    y = x * 1
    a, b = y.chunk(2, 1)
    z = a * b
    z.sum().backward()
    return z, x.grad


def saved_then_changed(x: Any, w: Any) -> Any:
    y = x.exp()
    z = y * w
    y.add_(1)
    z.sum().backward()


def saved_view_then_changed(x: Any, w: Any) -> Any:
    y = x * 1
    z = y[1].exp() * y[0]
    y[2].zero_()
    z.sum().backward()


@each(*[p for p in list(globals().values()) if getattr(p, "__module__", None) == __name__ and callable(p)])
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, X, W)
