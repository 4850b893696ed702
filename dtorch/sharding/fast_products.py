"""Direct formulas (see `fast_shapes`) for products of matrices, attention and embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .fast_shapes import Outputs, formula
from .products import batch_of
from .spec import contiguous_stride
from .strides import preserved

aten = torch.ops.aten


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> Outputs:
    return ((shape, contiguous_stride(shape), dtype),)


@formula(aten.mm.default)
def mm(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    a, b = args
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        return None
    return _fresh((a.shape[0], b.shape[1]), a.dtype)


@formula(aten.bmm.default)
def bmm(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    a, b = args
    if len(a.shape) != 3 or len(b.shape) != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return None
    return _fresh((*a.shape[:2], b.shape[2]), a.dtype) if a.dtype == b.dtype else None


@formula(aten.linear.default)
def linear(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    x, weight, *bias = args
    if kwargs or len(weight.shape) != 2 or len(x.shape) < 2 or x.shape[-1] != weight.shape[1] or 0 in x.shape:
        return None
    if (
        not x.dtype.is_floating_point
        or x.dtype != weight.dtype
        or any(b is not None and (b.dtype != x.dtype or tuple(b.shape) != (weight.shape[0],)) for b in bias)
    ):
        return None
    return _fresh((*x.shape[:-1], weight.shape[0]), x.dtype)


@formula(aten.matmul.default)
def matmul(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """Of two stacks of matrices, which stay in order; where one is a single matrix torch may make a transposed result."""
    a, b = args
    if len(a.shape) < 3 or len(b.shape) < 3 or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype:
        return None
    if not a.dtype.is_floating_point:
        return None
    batch = batch_of(a.shape, b.shape)
    if batch is None or 0 in a.shape or 0 in b.shape:
        return None
    return _fresh((*batch, a.shape[-2], b.shape[-1]), a.dtype)


@formula(aten._scaled_dot_product_flash_attention_for_cpu.default)
def attention(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    q, k, v, *rest = args
    if not all(len(t.shape) == 4 and t.dtype == q.dtype and 0 not in t.shape for t in (q, k, v)):
        return None
    if rest and rest[0] != 0.0:  # dropout
        return None
    batch, heads, length, width = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != width or heads % k.shape[1]:
        return None
    mask = kwargs.get("attn_mask")
    if mask is not None and (len(mask.shape) != 4 or mask.dtype not in (torch.bool, q.dtype)):
        return None
    if q.dtype not in (torch.float32, torch.float64):
        return None
    sums = ((batch, heads, length), (length * heads, 1, heads), q.dtype)
    return ((tuple(q.shape), preserved(tuple(q.shape), q.stride), q.dtype), sums)


@formula(aten.embedding.default)
def embedding(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    weight, indices = args[:2]
    if kwargs or len(weight.shape) != 2 or indices.dtype not in (torch.int64, torch.int32):
        return None
    return _fresh((*indices.shape, weight.shape[1]), weight.dtype)
