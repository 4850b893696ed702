"""Direct formulas (see `fast_shapes`) for views, and for ops that copy: what a decode step meets with every new length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .fast_shapes import Outputs, formula
from .spec import contiguous_stride
from .strides import is_channels_last, preserved

aten = torch.ops.aten


@formula(aten.view.default, aten._unsafe_view.default)
def view(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if kwargs or len(args) != 2:
        return None
    x, size = args
    shape = _sizes(math.prod(x.shape), size)
    stride = None if shape is None else _view_stride(x.shape, x.stride, shape)
    return None if stride is None else ((shape, stride, x.dtype),)  # type: ignore[return-value]


def _sizes(count: int, size: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that a size with at most one -1 means for ``count`` elements; None if torch refuses it, and for no elements."""
    known, unknown = 1, -1
    for dim, n in enumerate(size):
        if n == -1 and unknown < 0:
            unknown = dim
        elif n <= 0:
            return None
        else:
            known *= n
    if count == 0 or count % known or (unknown < 0 and count != known):
        return None
    return tuple(size) if unknown < 0 else (*size[:unknown], count // known, *size[unknown + 1 :])


def _view_stride(old: Sequence[int], stride: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """torch's ``computeStride``: None where no view will do."""
    if not old:
        return (1,) * len(new)
    found = [0] * len(new)
    at, base = len(new) - 1, stride[-1]
    count = viewed = 1
    for dim in range(len(old) - 1, -1, -1):
        count *= old[dim]
        if dim and (old[dim - 1] == 1 or stride[dim - 1] == count * base):
            continue
        while at >= 0 and (viewed < count or new[at] == 1):
            found[at] = viewed * base
            viewed *= new[at]
            at -= 1
        if viewed != count:
            return None
        if dim:
            base, count, viewed = stride[dim - 1], 1, 1
    return tuple(found) if at < 0 else None


@formula(aten.t.default)
def t(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    x = args[0]
    return _permuted(x, range(len(x.shape) - 1, -1, -1)) if len(x.shape) <= 2 else None


@formula(aten.transpose.int)
def transpose(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    x, *dims = args
    ndim = len(x.shape)
    if kwargs or len(dims) != 2 or not all(-ndim <= d < ndim for d in dims):
        return None
    order = list(range(ndim))
    a, b = dims
    order[a], order[b] = order[b], order[a]
    return _permuted(x, order)


@formula(aten.permute.default)
def permute(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if kwargs or len(args) != 2:
        return None
    x, dims = args
    ndim = len(x.shape)
    order = [d + ndim if d < 0 else d for d in dims]
    return _permuted(x, order) if sorted(order) == list(range(ndim)) else None


def _permuted(x: Any, order: Sequence[int]) -> Outputs:
    return ((tuple([x.shape[d] for d in order]), tuple([x.stride[d] for d in order]), x.dtype),)


@formula(aten.unsqueeze.default)
def unsqueeze(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if kwargs or len(args) != 2:
        return None
    x, dim = args
    ndim = len(x.shape) + 1
    if not -ndim <= dim < ndim:
        return None
    dim %= ndim
    step = x.shape[dim] * x.stride[dim] if dim < ndim - 1 else 1
    return (((*x.shape[:dim], 1, *x.shape[dim:]), (*x.stride[:dim], step, *x.stride[dim:]), x.dtype),)


@formula(aten.squeeze.dim)
def squeeze(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if kwargs or len(args) != 2:
        return None
    x, dim = args
    ndim = len(x.shape)
    if not -ndim <= dim < ndim:
        return None
    dim %= ndim
    return _without(x, dim) if x.shape[dim] == 1 else ((tuple(x.shape), x.stride, x.dtype),)


@formula(aten.select.int)
def select(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if kwargs or len(args) != 3:
        return None
    x, dim, index = args
    ndim = len(x.shape)
    if not -ndim <= dim < ndim or not -x.shape[dim] <= index < x.shape[dim]:
        return None
    return _without(x, dim % ndim)


def _without(x: Any, dim: int) -> Outputs:
    return (((*x.shape[:dim], *x.shape[dim + 1 :]), (*x.stride[:dim], *x.stride[dim + 1 :]), x.dtype),)


@formula(aten.expand.default)
def expand(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if len(args) != 2 or not set(kwargs) <= {"implicit"}:
        return None
    x, size = args
    added = len(size) - len(x.shape)
    if added < 0 or any(n < 0 for n in size[:added]):
        return None
    shape, stride = list(size), [0] * len(size)
    for dim, (own, step) in enumerate(zip(x.shape, x.stride, strict=True), added):
        if size[dim] in (-1, own):
            shape[dim], stride[dim] = own, step
        elif own != 1 or size[dim] < 0:
            return None
    for dim in range(
        added - 1, -1, -1
    ):  # torch gives new dims of size 1 the step of a contiguous tensor, and others none
        stride[dim] = shape[dim + 1] * stride[dim + 1] if shape[dim] == 1 and dim + 1 < len(shape) else 0
    return ((tuple(shape), tuple(stride), x.dtype),)


@formula(aten.clone.default)
def clone(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    x = args[0]
    if len(args) != 1 or not set(kwargs) <= {"memory_format"}:
        return None
    shape, kept = tuple(x.shape), kwargs.get("memory_format")
    if kept is torch.contiguous_format:
        return ((shape, contiguous_stride(shape), x.dtype),)
    if kept not in (None, torch.preserve_format) or any(n > 1 and s == 0 for n, s in zip(shape, x.stride, strict=True)):
        return None
    return ((shape, preserved(shape, x.stride), x.dtype),)


@formula(aten.cat.default)
def cat(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    tensors = args[0]
    first = tensors[0] if tensors else None
    if first is None or not first.shape:
        return None
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    ndim = len(first.shape)
    if not -ndim <= dim < ndim:
        return None
    dim %= ndim
    before, after = first.shape[:dim], first.shape[dim + 1 :]
    total = 0
    for t in tensors:
        shape = t.shape
        if t.dtype != first.dtype or len(shape) != ndim or shape[:dim] != before or shape[dim + 1 :] != after:
            return None
        total += shape[dim]
    if all(map(is_channels_last, tensors)):
        return None
    out = (*before, total, *after)
    return ((out, contiguous_stride(out), first.dtype),)
