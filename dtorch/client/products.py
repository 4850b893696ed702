"""``linear``, ``matmul`` and ``tensordot`` as one op, with a gradient of their own.

torch makes of each a product of two matrices, for which several dims become one. Shards of a dim that is not the first of those are
no consecutive rows, and uneven shards of the first no equal parts, so that the tensor would be redistributed before every product and
after: hidden states whose sequence is split, for one. As one op nothing moves. The gradients are other such products, to any order.
And it is one op to issue, where torch's way of a ``linear`` of three dims is four forward and eight backward.

``torch.func`` and traces get torch's way where it moves nothing: an ``autograd.Function`` of Python's has no place there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..sharding.products import batch_of, linear_breaks, matmul_breaks, tensordot_breaks
from ..tensor import Tensor
from . import dispatch
from .torch_internals import below_autograd, compose, is_differentiated, is_in_dispatch_mode, is_transformed

aten = torch.ops.aten
LINEAR, MATMUL, TENSORDOT, MM = aten.linear.default, aten.matmul.default, aten.tensordot.default, aten.mm.default


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch's op: (…, I), (O, I), (O) or None → (…, O)."""
    given = (x, weight) if bias is None else (x, weight, bias)
    fits = (
        _are_alike(given)
        and weight.ndim == 2 <= x.ndim
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
    )
    if fits and not is_differentiated(*given):
        return run_whole(LINEAR, *given)
    if fits and (not is_transformed() or linear_breaks(x._spec)):
        return _Linear.apply(x, weight, bias)
    return compose(LINEAR, *given)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's op: (…, M, K), (…, K, N) → (…, M, N); one of them may be a vector (K)."""
    if not (_are_alike((a, b)) and min(a.ndim, b.ndim) > 0 and max(a.ndim, b.ndim) > 2):
        return compose(MATMUL, a, b)
    if a.ndim == 1:
        return matmul(a.unsqueeze(0), b).squeeze(-2)
    if b.ndim == 1:
        return matmul(a, b.unsqueeze(1)).squeeze(-1)
    batch = batch_of(a.shape, b.shape) if a.shape[-1] == b.shape[-2] else None
    if batch is not None and not is_differentiated(a, b):
        return run_whole(MATMUL, a, b)
    if batch is not None and (not is_transformed() or matmul_breaks(a._spec, b._spec, batch)):
        return _Matmul.apply(a, b)
    return compose(MATMUL, a, b)


def tensordot(a: torch.Tensor, b: torch.Tensor, dims_a: Sequence[int], dims_b: Sequence[int]) -> torch.Tensor:
    """torch's op: the dims of ``a`` that are not contracted, then those of ``b``."""
    if _are_alike((a, b)) and tensordot_breaks(a._spec, b._spec, dims_a, dims_b):
        return _Tensordot.apply(a, b, [d % a.ndim for d in dims_a], [d % b.ndim for d in dims_b])
    return compose(TENSORDOT, a, b, dims_a, dims_b)


def run(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dispatch handler, where an op arrives whole: under inference mode."""
    return WHOLE[info.op](*args, **kwargs)


WHOLE = {LINEAR: linear, MATMUL: matmul, TENSORDOT: tensordot}


def _are_alike(tensors: Sequence[Any]) -> bool:
    """Whether all are placed, and of one dtype."""
    dtype = None
    for tensor in tensors:
        spec = tensor._spec if type(tensor) is Tensor else None
        if spec is None or not (dtype is None or spec.dtype is dtype):
            return False
        dtype = spec.dtype
    return True


def run_whole(op: Any, *args: Any) -> Any:
    """A composite op as one, whatever torch makes of it."""
    if is_in_dispatch_mode():  # which is to see the op
        with below_autograd():
            return op(*args)
    return dispatch.call(dispatch.info_of(op), args, {})


def _part(op: Any, *args: Any) -> Any:
    """A product that a gradient is made of: as one op, unless it is itself to have a gradient."""
    return op(*args) if torch.is_grad_enabled() else run_whole(op, *args)


def _tangent(product: Callable[..., Any], a: Any, b: Any, of_a: Any, of_b: Any) -> Any:
    """Of a product, given the tangents of its factors; None if neither has one."""
    parts = [product(*factors) for factors in ((of_a, b), (a, of_b)) if None not in factors]
    return sum(parts[1:], parts[0]) if parts else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        return run_whole(LINEAR, x, weight) if bias is None else run_whole(LINEAR, x, weight, bias)

    @staticmethod
    def jvp(ctx: Any, of_x: Any, of_weight: Any, of_bias: Any) -> Any:
        x, weight = ctx.saved_tensors
        tangent = _tangent(torch.nn.functional.linear, x, weight, of_x, of_weight)
        if tangent is None:
            return of_bias.expand(*x.shape[:-1], weight.shape[0])
        return tangent if of_bias is None else tangent + of_bias

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = list(range(x.ndim - 1))
        if x.is_complex():
            x, weight = x.conj(), weight.conj()
        grad_x = grad_weight = None
        if of_x:
            grad_x = _part(MATMUL if x.ndim > 2 else MM, grad, weight)
        if of_weight:
            grad_weight = _part(TENSORDOT, grad, x, rows, rows)
        return grad_x, grad_weight, grad.sum(rows) if of_bias else None


def _summed(grad: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The gradient of what was broadcast from ``shape``."""
    return grad if grad.shape == shape else grad.sum_to_size(shape)


class _Matmul(torch.autograd.Function):
    """Neither is a vector, and not both are matrices."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        return run_whole(MATMUL, a, b)

    @staticmethod
    def jvp(ctx: Any, of_a: Any, of_b: Any) -> Any:
        return _tangent(torch.matmul, *ctx.saved_tensors, of_a, of_b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        of_a, of_b = ctx.needs_input_grad
        if a.is_complex():
            a, b = a.conj(), b.conj()
        batch = list(range(grad.ndim - 2))
        grad_a = grad_b = None
        if of_a and a.ndim == 2:
            dims = [*batch, grad.ndim - 1]
            grad_a = _part(TENSORDOT, grad, b, dims, dims)
        elif of_a:
            grad_a = _summed(_part(MATMUL, grad, b.mT), a.shape)
        if of_b and b.ndim == 2:
            dims = [*batch, grad.ndim - 2]
            grad_b = _part(TENSORDOT, a, grad, dims, dims)
        elif of_b:
            grad_b = _summed(_part(MATMUL, a.mT, grad), b.shape)
        return grad_a, grad_b


class _Tensordot(torch.autograd.Function):
    """No dim is counted from the end."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, dims_a: list[int], dims_b: list[int]) -> Any:
        ctx.save_for_backward(a, b)
        ctx.save_for_forward(a, b)
        ctx.dims = dims_a, dims_b
        return run_whole(TENSORDOT, a, b, dims_a, dims_b)

    @staticmethod
    def jvp(ctx: Any, of_a: Any, of_b: Any, *dims: Any) -> Any:
        product = functools.partial(torch.tensordot, dims=ctx.dims)
        return _tangent(product, *ctx.saved_tensors, of_a, of_b)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        dims_a, dims_b = ctx.dims
        left = [d for d in range(a.ndim) if d not in dims_a]
        right = [d for d in range(b.ndim) if d not in dims_b]
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            found = aten.tensordot(grad, b.conj(), list(range(len(left), grad.ndim)), right)
            grad_a = _in_order(found, left + [i for _, i in sorted(zip(dims_b, dims_a, strict=True))])
        if ctx.needs_input_grad[1]:
            found = aten.tensordot(a.conj(), grad, left, list(range(len(left))))
            grad_b = _in_order(found, [j for _, j in sorted(zip(dims_a, dims_b, strict=True))] + right)
        return grad_a, grad_b, None, None


def _in_order(tensor: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The tensor whose dim ``dims[i]`` is dim ``i`` of ``tensor``."""
    return tensor.permute([dims.index(d) for d in range(len(dims))])
