"""Stride orders: what an op's local result must look like so that later views mean what the client thinks they mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def restride(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """``tensor`` with its dims in ``order``, from the largest stride to the smallest, and dense; itself if it is that already."""
    inverse = [0] * len(order)
    for position, dim in enumerate(order):
        inverse[dim] = position
    return tensor.permute(list(order)).contiguous().permute(inverse)


def is_certainly_in_order(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether the strides are in ``order``, whatever sizes a later run has: no dim is so small that it could hide another order."""
    strides = [tensor.stride(dim) for dim in order]
    return all(size > 1 for size in tensor.shape) and strides == sorted(strides, reverse=True)


def restride_if_tensor(value: object, order: Sequence[int]) -> object:
    """`restride` for what a transfer may give: a tensor, a `Poison`, or None."""
    return restride(value, order) if isinstance(value, torch.Tensor) else value
