"""Device functions that create tensors, and that write a slice into a sharded one."""

from __future__ import annotations

from typing import Any

import torch

from .registry import Here, device_function


@device_function("dtorch.slice_write", writes=(0,))
def slice_write(
    here: Here, target: torch.Tensor, source: torch.Tensor, dim: int, start: int, stop: int, step: int
) -> tuple[()]:
    """``whole[start:stop:step] = source`` along ``dim``, as far as it falls into this device's part of the whole.

    Args:
        target: this device's part; input layout 0.
        source: the slice, whole along ``dim``, like ``target`` along the other dims.
        start, stop, step: as ``slice.indices`` gives them, with a positive step.
    """
    low, high = here.input_range(dim)
    first = max(0, -(-(low - start) // step))  # the first index of the slice at or behind ``low``
    count = len(range(start + first * step, min(stop, high), step))
    if count:
        part = target.narrow(dim, start + first * step - low, (count - 1) * step + 1)
        index = [slice(None)] * target.ndim
        index[dim] = slice(None, None, step)
        part[tuple(index)].copy_(source.narrow(dim, first, count))
    return ()


@device_function("dtorch.agreed", writes=(0,))
def agreed(here: Here, copies: list[torch.Tensor]) -> tuple[()]:
    """Nothing, at the end of what brings a write to all of ``copies``: they count as written by it, so that its failure is theirs."""
    return ()


@device_function("dtorch.full")
def full(here: Here, value: complex, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(here.output_shape(), value, dtype=dtype, device=here.device)


@device_function("dtorch.arange")
def arange(here: Here, start: float, step: float, dtype: torch.dtype) -> torch.Tensor:
    """This device's part of ``torch.arange``; its length is the layout's."""
    ((low, high),) = here.output_box()
    if not dtype.is_floating_point:
        return torch.arange(high - low, dtype=dtype, device=here.device).mul_(step).add_(start + low * step)
    # torch steps from the start of each vector, so the last bit of a value depends on what stands before it: make it all.
    (length,) = here.outputs[0][1]
    whole = (
        torch.arange(start, start + step * (length - 0.5), step, dtype=dtype) if length else torch.empty(0, dtype=dtype)
    )
    return whole[low:high].to(here.device, copy=True)


@device_function("dtorch.linspace")
def linspace(here: Here, start: float, end: float, dtype: torch.dtype) -> torch.Tensor:
    """This device's part of ``torch.linspace``; the number of steps is the layout's length."""
    ((low, high),) = here.output_box()
    return torch.linspace(start, end, here.outputs[0][1][0], dtype=dtype)[low:high].to(here.device, copy=True)


@device_function("dtorch.eye")
def eye(here: Here, dtype: torch.dtype) -> torch.Tensor:
    rows, columns = (torch.arange(low, high, device=here.device) for low, high in here.output_box())
    return (rows[:, None] == columns).to(dtype)


@device_function("dtorch.tril")
def tril(here: Here, x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    return torch.tril(x, _local_diagonal(here, diagonal))


@device_function("dtorch.triu")
def triu(here: Here, x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    return torch.triu(x, _local_diagonal(here, diagonal))


def _local_diagonal(here: Here, diagonal: int) -> int:
    (row, _), (column, _) = here.input_box(0)[-2:]
    return diagonal + row - column


@device_function("dtorch.mkldnn_rnn_layer")
def mkldnn_rnn_layer(here: Here, *args: Any) -> Any:
    """The op keeps the workspace that its backward needs only where gradients are on (2.13), and workers run without."""
    with torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


@device_function("dtorch.histc")
def histc(here: Here, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The CPU kernel takes no integers; accelerators' do, and library code that sees a device that is not cpu relies on it."""
    if x.is_floating_point():
        return torch.histc(x, *args, **kwargs)
    return torch.histc(x.double(), *args, **kwargs).to(x.dtype)
