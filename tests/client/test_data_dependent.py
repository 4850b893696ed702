"""Shapes and control flow that depend on values: nonzero, masks, unique, item() in an if."""

from __future__ import annotations

from typing import Any

import torch

from .same import each, every_engine, every_layout, same

pytestmark = [every_engine, every_layout]

X = torch.tensor([[0.0, 1, 2, 0, -1, 5], [3, 0, 0, 1, 1, 2], [0, 0, 0, 0, 0, 0], [7, -2, 0, 2, 5, 1]])


def nonzero(x: Any) -> Any:
    return x.nonzero(), torch.nonzero(x, as_tuple=True), torch.argwhere(x > 1), (x > 100).nonzero(), x[0, 0].nonzero()


def masks(x: Any) -> Any:
    return (
        x[x > 0],
        x[x.sum(1) > 4],
        x[:, x[0] > 0],
        torch.masked_select(x, x > 1),
        x[x > 100],
        x[(x > 0).any(1)][:, 1:],
    )


def unique(x: Any) -> Any:
    return (
        torch.unique(x),
        torch.unique(x, return_inverse=True, return_counts=True),
        torch.unique(x, dim=0),
        torch.unique_consecutive(x[1]),
        torch.unique(x.long(), sorted=True),
    )


def counted(x: Any) -> Any:
    ints = x.abs().long().flatten()
    return (
        torch.bincount(ints),
        torch.bincount(ints, minlength=20),
        torch.histc(x, 4),
        torch.repeat_interleave(x, ints[:4], 0),
    )


def where(x: Any) -> Any:
    return torch.where(x > 0), torch.where(x > 0, x, 0.0), x.where(x > 0, torch.zeros(6))


def results_go_on(x: Any) -> Any:
    rows, columns = torch.where(x > 1)
    found = x[rows, columns]
    return (
        found * 2,
        found.sum(),
        x.index_put((rows, columns), torch.tensor(0.0)),
        torch.cat([found, x[0]]),
        found.sort().values,
    )


def with_gradients(x: Any) -> Any:
    w = x.clone().requires_grad_()
    (w[w > 0] ** 2).sum().backward()
    first = w.grad.clone()
    w.grad = None
    torch.masked_select(w, w < 2).exp().sum().backward()
    return first, w.grad


def written_by_mask(x: Any) -> Any:
    y = x.clone()
    y[y > 1] = -1
    y[y == 0] += 3
    y[y.sum(1) > 0] = torch.arange(6.0)
    y[torch.nonzero(y[:, 0] > 1)[:, 0], 1] = 9
    return y, y.masked_scatter(x > 0, torch.arange(24.0)), y.masked_fill_(x > 2, 0)


def control_flow(x: Any) -> Any:
    steps = 0
    while x.abs().max() > 0.5:
        x = x / 2
        steps += 1
    if x.sum() > 0:
        x = -x
    out = [row.argmax().item() for row in x if row.any()]
    return steps, x, out, [float(v) for v in x[0] if v != 0], "big" if (x > 1).any() else "small"


def early_stop(x: Any) -> Any:
    best, losses = float("inf"), []
    for k in range(5):
        loss = ((x - k) ** 2).mean()
        losses.append(loss.item())
        if loss.item() > best:
            break
        best = min(best, loss.item())
    return losses, best


def beam(x: Any) -> Any:
    scores, picks = x.log_softmax(1).topk(2)
    order = scores[:, 0].argsort(descending=True)
    return x[order], picks.tolist(), [x[i, p].item() for i, p in enumerate(picks[:, 0].tolist())]


def slices_by_values(x: Any) -> Any:
    n = int((x[0] != 0).sum())
    return x[:, :n], x.narrow(1, 0, n), x[: x[1, 0].long()], torch.zeros(n).to(x) + x[0, :n]


def compared(x: Any) -> Any:
    return (
        torch.equal(x, x.clone()),
        torch.allclose(x, x + 1),
        (x == x).all().item(),
        x.isnan().any().item(),
        torch.isin(x, torch.tensor([1.0, 2])).sum(),
    )


def combinations(x: Any) -> Any:
    return (
        torch.combinations(x[0], 2),
        torch.cartesian_prod(x[0, :2], x[1, :3]),
        torch.tril_indices(3, 3),
        torch.meshgrid(x[0], x[1], indexing="ij")[0],
    )


@each(*[p for p in list(globals().values()) if getattr(p, "__module__", None) == __name__ and callable(p)])
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, X)
