"""Device functions that sharding rules put in place of an op (``local``) or behind it (``finish``).

A ``local`` takes the op's arguments and runs for all mesh axes at once; a ``finish`` takes the list of completed outputs, then the
op's arguments with None for its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

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


def _extremum(
    function: Any, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool, identity: float | int
) -> Tensor:
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
