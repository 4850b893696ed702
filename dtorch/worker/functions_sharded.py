"""Device functions that sharding rules put in place of an op (``local``) or behind it (``finish``).

A ``local`` takes the op's arguments and runs for all mesh axes at once; a ``finish`` takes the list of completed outputs, then the
op's arguments with None for its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..sharding.layout import stride_order
from ..sharding.rules.losses import POINTWISE_LOSS_BACKWARDS, POINTWISE_LOSSES
from .registry import Here, device_function

aten = torch.ops.aten
Tensor = torch.Tensor


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)] if x.ndim else []


@device_function("dtorch.view_as_output")
def view_as_output(here: Here, x: Tensor, *args: Any) -> Tensor:
    """A view whose size is known from the layout: dims of size 1 that go away."""
    return x.view(here.output_shape())


@device_function("dtorch.split_evenly")
def split_evenly(here: Here, x: Tensor, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """A packed dim into its parts; the sizes given are those of the whole."""
    return x.chunk(len(here.outputs), dim)


@device_function("dtorch.join_evenly")
def join_evenly(here: Here, parts: list[Tensor], dim: int) -> Tensor:
    """The inverse."""
    return torch.cat(parts, dim)


@device_function("dtorch.reshape_alias")
def reshape_alias(here: Here, x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """``aten._reshape_alias`` with strides that fit the part."""
    return x.view(here.output_shape())


@device_function("dtorch.mean")
def mean(
    here: Here,
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """This device's addend of the mean: its sum over the count of the whole. Half types are summed in float32."""
    dims = _dims(x, dim)
    count = math.prod(here.inputs[0][1][d] for d in dims)
    out = dtype or x.dtype
    wide = torch.float32 if out in (torch.bfloat16, torch.float16) else out
    total = x.sum(dims, keepdim, dtype=wide) if dims else x.to(wide)
    return (total / count).to(out) if count else (total / 0).to(out)


@device_function("dtorch.amax")
def amax(here: Here, x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return _extremum(torch.amax, x, dim, keepdim, lowest(x.dtype))


@device_function("dtorch.amin")
def amin(here: Here, x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    return _extremum(torch.amin, x, dim, keepdim, highest(x.dtype))


def lowest(dtype: torch.dtype) -> float:
    """What the maximum of nothing is."""
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> float:
    """What the minimum of nothing is."""
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _extremum(function: Any, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, identity: float) -> Tensor:
    dims = _dims(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        gone = set(dims)
        shape = [1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone]
        return x.new_full(shape, identity)
    return function(x, dims, keepdim) if dims else x.clone()


@device_function("dtorch.norm_part")
def norm_part(
    here: Here,
    x: Tensor,
    ord: float | None = 2,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What this device adds to a vector norm: its sum of powers, or the extremum of its absolute values."""
    dims = _dims(x, dim)
    size = x.to(dtype).abs() if dtype is not None else x.abs()
    order = 2.0 if ord is None else float(ord)
    if order == math.inf:
        return _extremum(torch.amax, size, dims, keepdim, 0.0)
    if order == -math.inf:
        return _extremum(torch.amin, size, dims, keepdim, math.inf)
    powers = (
        (size != 0).to(size.dtype) if order == 0 else size * size if order == 2 else size if order == 1 else size**order
    )
    return powers.sum(dims, keepdim) if dims else powers


@device_function("dtorch.norm_root")
def norm_root(here: Here, outputs: list[Tensor], x: None, ord: float | None = 2, *args: Any, **kwargs: Any) -> Tensor:
    """The norm from the whole sum of powers."""
    order = 2.0 if ord is None else float(ord)
    total = outputs[0]
    return total.sqrt() if order == 2 else total if order == 1 else total ** (1 / order)


@device_function("dtorch.foreach_norm_part")
def foreach_norm_part(
    here: Here, tensors: list[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    return tuple(norm_part(here, t, ord, dtype=dtype) for t in tensors)


@device_function("dtorch.foreach_norm_root")
def foreach_norm_root(
    here: Here, outputs: list[Tensor], tensors: Any, ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    return tuple(norm_root(here, [total], None, ord) for total in outputs)


@device_function("dtorch.embedding")
def embedding(here: Here, weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    """The rows this device holds; zeros for the others, so that the devices' results add up."""
    start, stop = here.input_box(0)[0]
    size = here.inputs[0][1][0]
    legal = ((indices >= 0) & (indices < size)).all()
    if indices.device.type != "cpu":
        torch._assert_async(legal)  # reading it here would wait for the device
    elif not legal:
        raise IndexError("index out of range in self")
    if stop == start:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    outside = (indices < start) | (indices >= stop)
    rows = aten.embedding.default(weight, (indices - start).masked_fill(outside, 0))
    return rows.masked_fill_(outside.unsqueeze(-1), 0)


@device_function("dtorch.new_empty_strided")
def new_empty_strided(here: Here, x: Tensor, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Tensor:
    """The part of such a tensor, packed, its dims in the same order in memory."""
    shape = here.output_shape()
    order = stride_order(shape, stride)
    inverse = [order.index(d) for d in range(len(shape))]
    return aten.new_empty.default(x, [shape[d] for d in order], **kwargs).permute(inverse)


@device_function("dtorch.native_group_norm")
def native_group_norm(
    here: Here, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hxw: int, group: int, eps: float
) -> tuple[Tensor, ...]:
    mine = group * x.shape[1] // c
    return aten.native_group_norm.default(x, weight, bias, x.shape[0], x.shape[1], hxw, mine, eps)


@device_function("dtorch.native_group_norm_backward")
def native_group_norm_backward(
    here: Here,
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    mine = group * x.shape[1] // c
    return aten.native_group_norm_backward.default(grad, x, mean, rstd, weight, x.shape[0], x.shape[1], hxw, mine, mask)


@device_function("dtorch.convolution")
def convolution(here: Here, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
    """A part of the groups of a convolution, which are the last argument."""
    *rest, groups = args
    return aten.convolution.default(x, weight, bias, *rest, groups * x.shape[1] // here.inputs[0][1][1])


@device_function("dtorch.convolution_backward")
def convolution_backward(here: Here, grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    *rest, groups, mask = args
    whole = here.inputs[1][1][1]
    return aten.convolution_backward.default(grad, x, weight, *rest, groups * x.shape[1] // whole, mask)


@device_function("dtorch.nll_loss_sum")
def nll_loss_sum(
    here: Here, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, ...]:
    """The sums of a mean: of the losses and of the weights."""
    op = aten.nll_loss_forward.default if x.ndim == 2 else aten.nll_loss2d_forward.default
    return op(x, target, weight, 2, ignore_index)


@device_function("dtorch.nll_loss_mean")
def nll_loss_mean(here: Here, outputs: list[Tensor], *args: Any) -> tuple[Tensor, ...]:
    total, weight = outputs
    return total / weight, weight


def _mean_of_loss(op: Any) -> Any:
    def function(here: Here, *args: Any, **kwargs: Any) -> Tensor:
        count = math.prod(torch.broadcast_shapes(*[shape for _, shape in here.inputs[:2]]))
        each = op(*_with_reduction(op, args, 0), **kwargs)
        wide = torch.float32 if each.dtype in (torch.float16, torch.bfloat16) else each.dtype
        return (each.sum(dtype=wide) / count).to(each.dtype)

    return function


def _mean_of_loss_backward(op: Any) -> Any:
    def function(here: Here, grad: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        count = math.prod(torch.broadcast_shapes(*[shape for _, shape in here.inputs[1:3]]))
        return op(grad / max(count, 1), *_with_reduction(op, (grad, *args), 2)[1:], **kwargs)

    return function


def _with_reduction(op: Any, args: tuple[Any, ...], reduction: int) -> list[Any]:
    """``args`` with another value for ``reduction``, which may have been left out."""
    position = next(i for i, a in enumerate(op._schema.arguments) if a.name == "reduction")
    defaults = [a.default_value for a in op._schema.arguments[len(args) : position]]
    return [*args[:position], *defaults, reduction, *args[position + 1 :]]


for _op, _name in POINTWISE_LOSSES.items():
    device_function(f"dtorch.mean_of.{_name}")(_mean_of_loss(_op))
for _op, _name in POINTWISE_LOSS_BACKWARDS.items():
    device_function(f"dtorch.mean_of.{_name}")(_mean_of_loss_backward(_op))
