"""``linear`` of a batch of sequences that are both split, by different axes: one op, with a gradient of its own.

torch makes of it a product of matrices: batch and sequence become one dim, of which such a tensor's shards are no consecutive rows, so that
it would be redistributed before every product and after. As one op nothing moves. The gradient of the weight is another such op,
``tensordot`` over all dims but the last, whose result is a pending sum.
"""

from __future__ import annotations

from typing import Any

import torch

from ..placement import is_shard
from ..tensor import Tensor
from . import dispatch

aten = torch.ops.aten
#: Of our handles, wherever the workers compute.
CPU = "cpu"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``; kept whole where ``x`` is sharded along dims between its first and its last."""
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if not all(type(t) is Tensor and t._spec is not None for t in tensors) or not _between(x):
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_autocast_enabled(CPU):
        x, weight, bias = (_cast(t) for t in (x, weight, bias))
    return _Linear.apply(x, weight, bias)


def _cast(t: Any) -> Any:
    """As autocast casts what goes into a ``linear``."""
    castable = t is not None and t.is_floating_point() and t.dtype != torch.float64
    return t.to(torch.get_autocast_dtype(CPU)) if castable else t


def _between(x: Any) -> bool:
    """Whether a dim is split that is neither the first nor the last."""
    spec = x._spec
    split = {p.dim for p, size in zip(spec.placements, spec.mesh.shape, strict=True) if size > 1 and is_shard(p)}
    return any(0 < dim < x.ndim - 1 for dim in split)


def _run(op: Any, *args: Any) -> Any:
    return dispatch.call(dispatch.info_of(op), args, {})


class _Linear(torch.autograd.Function):
    """(…, I), (O, I), (O) or None → (…, O)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return _run(aten.linear.default, x, weight) if bias is None else _run(aten.linear.default, x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            linear(grad, weight.t()) if of_x else None,
            _Outer.apply(grad, x) if of_weight else None,
            grad.sum(tuple(range(grad.ndim - 1))) if of_bias else None,
        )


class _Outer(torch.autograd.Function):
    """(…, O), (…, I) → (O, I), summed over what comes before."""

    @staticmethod
    def forward(ctx: Any, y: Any, x: Any) -> Any:
        ctx.save_for_backward(y, x)
        dims = list(range(x.ndim - 1))
        return _run(aten.tensordot.default, y, x, dims, dims)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        y, x = ctx.saved_tensors
        return linear(x, grad), linear(y, grad.t())
