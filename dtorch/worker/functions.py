"""Device functions that create tensors, and that write a slice into a sharded one."""

from __future__ import annotations

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
    low, high = here.input_box(0)[dim]
    first = max(0, -(-(low - start) // step))  # the first index of the slice at or behind ``low``
    count = len(range(start + first * step, min(stop, high), step))
    if count:
        part = target.narrow(dim, start + first * step - low, (count - 1) * step + 1)
        index = [slice(None)] * target.ndim
        index[dim] = slice(None, None, step)
        part[tuple(index)].copy_(source.narrow(dim, first, count))
    return ()
