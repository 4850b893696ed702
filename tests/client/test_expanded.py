"""Writes to tensors in which one place in memory is several elements, and to what those are views of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard

from .same import compare, outcome

pytestmark = pytest.mark.usefixtures("engine")

SHAPES = [(1, 2, 1), (1, 1), (1, 4)]


def layouts(ndim: int) -> list[tuple[Any, list[Any]]]:
    one = [Replicate(), *[Shard(dim) for dim in range(ndim)]]
    return [*[([0, 1, 2], [p]) for p in one], ([[0, 1], [2, 3]], [Partial(), Shard(0)])]


def _larger(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(3 if n == 1 else n for n in x.shape)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expand": lambda x: x.expand(_larger(x)),
    "expand, same size": lambda x: x.expand(x.shape),
    "expand, new dim": lambda x: x.expand(2, *x.shape),
    "broadcast_to": lambda x: torch.broadcast_to(x, _larger(x)),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(torch.zeros(_larger(x)), x)[1],
    "expand_as": lambda x: x.expand_as(torch.zeros(2, *_larger(x))),
    "of a transposed": lambda x: x.transpose(0, -1).expand(2, *x.transpose(0, -1).shape),
    "row": lambda x: x.expand(_larger(x))[1 % _larger(x)[0]],
    "last": lambda x: x.expand(2, *x.shape)[..., -1],
}

WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "fill_": lambda x: x.fill_(57.0),
    "add_": lambda x: x.add_(1.0),
    "copy_": lambda x: x.copy_(torch.full(tuple(x.shape), 7.0)),
    "setitem": lambda x: x.__setitem__(-1, 5.0),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_writes_through_either_handle(shape: tuple[int, ...], view: str) -> None:
    base = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    for mesh, placements in layouts(len(shape)):
        for name, write in WRITES.items():
            for through in ("view", "base"):
                plain, placed = base.clone(), dtorch.distribute_tensor(base, dtorch.DeviceMesh("cpu", mesh), placements)
                found = []
                for x in (plain, placed):
                    y = VIEWS[view](x)
                    error = outcome(write, [y if through == "view" else x])
                    found.append((x, y, error if isinstance(error, Exception) else None))
                expected, actual = found
                try:
                    compare(actual[:2], expected[:2])
                    compare(actual[2], expected[2])
                except Exception as error:
                    raise AssertionError(f"{name} through the {through}, {mesh}, {placements}") from error
