# ruff: noqa: C416, UP031, UP032 - each way to write it is a way that is tested
"""What Python does with a tensor (len, iteration, in, bool, int, formatting, indexing a list) it does with a dtorch tensor."""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import numpy as np
import torch

import dtorch

from .same import each, every_engine, every_layout, place, same

pytestmark = [every_engine, every_layout]

MATRIX = torch.arange(12.0).reshape(4, 3) - 4.5


@each(
    len,
    list,
    lambda x: [r for r in x],
    lambda x: list(reversed(x)),
    lambda x: x.tolist(),
    lambda x: 4.5 in x,
    lambda x: -4.5 in x,
    lambda x: x[0, 0] in x,
    lambda x: [a.item() for a in x[0]],
    lambda x: max(x[0]),
    lambda x: sum(x),
    lambda x: bool(x),
    lambda x: "yes" if x[0, 0] < 0 else "no",
    lambda x: bool(x[0, 0]),
    lambda x: not x[0, 0],
    lambda x: float(x),
    lambda x: x.item(),
    lambda x: x[1, 1].item(),
    lambda x: int(x[2, 2]),
    lambda x: float(x[2, 2]),
    lambda x: complex(x[2, 2]),
    lambda x: round(float(x[2, 2]), 1),
    lambda x: math.sqrt(x[3, 2]),
    lambda x: [10, 20, 30][x[3, 2].long()],
    lambda x: [10, 20, 30][x[3, 2]],
    lambda x: range(5)[x[3, 2].long() :],
    lambda x: operator.index(x.long()[3, 2]),
    lambda x: f"{x.sum():.3f} {x[0, 0]:>8}",
    lambda x: f"{x:.3f}",
    lambda x: "%.2f %d" % (x[0, 0], x[3, 2]),
    lambda x: "{:.1e}".format(x[0, 0]),
    lambda x: x.dim() + x.ndim + x.numel() + x.nelement(),
    lambda x: (x.size(), x.size(0), x.shape, x.stride(), x.stride(0)),
    lambda x: (x.element_size(), x.is_floating_point(), x.is_complex(), x.is_contiguous(), x.t().is_contiguous()),
    lambda x: (x.is_leaf, x.requires_grad, x.grad is None, x.layout, x.is_sparse, x.names),
    lambda x: (x.nbytes, x.itemsize, x.type(), x.is_signed(), x.dim_order()),
    lambda x: hash(x) == hash(x) and x in {x} and {x: 1}[x],
    lambda x: (x == x).all().item(),
    lambda x: x is x.detach(),
    lambda x: x.T.shape,
    lambda x: x.mT,
    lambda x: x.H,
    lambda x: x[None, ..., -1],
    lambda x: x[[0, 2]],
    lambda x: x[[True, False, True, False]],
    lambda x: x[torch.tensor([0, 2])],
    lambda x: x[np.array([0, 2])],
    lambda x: x[x[:, 0] > 0],
    lambda x: x[:, torch.tensor([0, 2])][1],
    lambda x: x[7],
    lambda x: x[:, :, 0],
    lambda x: x["a"],
    lambda x: x[1:3, ::2],
    lambda x: x[::-1],
    lambda x: x[True],
    lambda x: x[False],
    lambda x: x[x[3, 2].long()],
    lambda x: x[x[3, 2].long() :],
    lambda x: x.to("cpu"),
    lambda x: x.cpu(),
    lambda x: x.unsqueeze(0).squeeze(),
    lambda x: np.asarray(x).tolist(),
    lambda x: np.asarray(x, dtype=np.float64).dtype.name,
    lambda x: x.numpy().sum().item(),
    lambda x: np.sum(x).item() if isinstance(np.sum(x), torch.Tensor) else float(np.sum(x)),
    lambda x: np.array(x)[1].tolist(),
    lambda x: x.__array__().shape,
    lambda x: divmod(7, 2) + (x[0, 0] // 2,),
    lambda x: [x // 2, x % 2, 2 // x, 2 % x, 2**x, x**2, 2 - x, 2 / x, -x, +x, abs(x)],
    lambda x: [x.long() << 1, x.long() >> 1, x.long() & 1, x.long() | 1, x.long() ^ 1, ~x.long(), 1 & x.long()],
    lambda x: x @ x.T,
    lambda x: x.T.__rmatmul__(x),
    lambda x: x.new_tensor([1, 2]),
    lambda x: x.new_zeros(2, 3),
    lambda x: x.new_full((2,), 3),
    lambda x: x.new_empty((2, 3)).shape,
    lambda x: x.index_select(0, torch.tensor([1])),
    lambda x: operator.iadd(x, 1),
    lambda x: operator.imul(x, 2),
    lambda x: operator.itruediv(x, 2),
    lambda x: operator.ipow(x, 2),
    lambda x: x.long().float().dtype,
    lambda x: x.apply_(lambda v: v + 1),
    lambda x: x.map_(x, lambda a, b: a + b),
    lambda x: torch.is_tensor(x) and isinstance(x, torch.Tensor),
    lambda x: torch.is_floating_point(x) and torch.is_nonzero(x[0, 0]),
    lambda x: torch.numel(x),
    lambda x: torch.result_type(x, 1j),
    lambda x: torch.broadcast_tensors(x, x[0])[1],
    lambda x: torch.equal(x, x.clone()) and x.equal(x) and not x.equal(x + 1),
    lambda x: torch.allclose(x, x + 1e-9) and not torch.allclose(x, x + 1),
    lambda x: copy.copy(x),
    lambda x: copy.deepcopy(x),
    lambda x: x.view(-1)[3],
    lambda x: x.__len__(),
    lambda x: torch.tensor(3.0) + x,
    lambda x: np.float32(3) * x,
    lambda x: x * np.float64(3),
    lambda x: torch.tensor([x[0, 0], x[1, 1]]),
    lambda x: torch.tensor([x[0, 0].item(), 1]),
    lambda x: torch.stack([x[0], x[1]]),
    lambda x: torch.cat([x, torch.zeros(2, 3)]),
    lambda x: torch.cat([torch.tensor([]), x]),
    lambda x: torch.cat([x.new_empty(0), x]),
    lambda x: torch.as_tensor(x).shape,
    lambda x: torch.asarray(x).shape,
    lambda x: torch.Tensor(x[0].tolist()),
    lambda x: x.tolist() == torch.tensor(x.tolist()).tolist(),
    lambda x: x.split([1, 3])[1],
    lambda x: [*x.unbind(1)][2],
    lambda x: (lambda a, b, c, d: a + d)(*x),
    lambda x: sorted(x[0].tolist()),
    lambda x: sorted(x[:, 0]),
    lambda x: any(v > 6 for v in x.flatten()),
    lambda x: all(row.sum() > -100 for row in x),
    lambda x: x.sum() == x.sum(),
    lambda x: (x[0, 0] == -4.5) is True,
    lambda x: isinstance(x[0, 0] > 0, torch.Tensor),
    lambda x: x.is_same_size(x.t().t()),
)
def test_a_program_that_treats_a_matrix_as_python_does(program: Any, layout: str) -> None:
    same(program, layout, MATRIX)


def test_a_data_loader_over_a_data_set_of_ours(layout: str) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(place(MATRIX, layout)), batch_size=3)
    for (batch,), expected in zip(loader, MATRIX.split(3), strict=True):
        assert type(batch) is dtorch.Tensor
        assert torch.equal(batch.to_torch(), expected)
