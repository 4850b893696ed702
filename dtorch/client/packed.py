"""Packed sequences: lengths and batch sizes are plain CPU tensors, as torch has them on every device, so the client knows every shape."""

from __future__ import annotations

from typing import Any

import torch

from ..tensor import Tensor


def pack(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``_pack_padded_sequence``: the rows that are no padding, step by step; and how many each step has, a plain tensor."""
    x, lengths, batch_first = args
    if type(lengths) is Tensor:
        lengths = lengths.to_torch()
    # torch itself checks the lengths and counts, on a tensor without features.
    _, sizes = info.op(torch.empty(x.shape[:2], device="cpu"), lengths, batch_first)
    if type(x) is not Tensor:
        return info.op(x, lengths, batch_first)
    steps = x.transpose(0, 1) if batch_first else x
    return steps.flatten(0, 1).index_select(0, _rows(sizes, steps.shape[1])), sizes


def pack_backward(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Its gradient: every row back to its place, zeros in the padding."""
    grad, size, sizes, batch_first = args
    batch = size[0] if batch_first else size[1]
    steps = size[1] if batch_first else size[0]
    flat = (
        grad.new_zeros([steps * batch, *size[2:]]).index_copy(0, _rows(sizes, batch), grad).unflatten(0, (steps, batch))
    )
    return flat.transpose(0, 1) if batch_first else flat


def _rows(sizes: torch.Tensor, batch: int) -> torch.Tensor:
    return torch.cat([torch.arange(n, device="cpu") + step * batch for step, n in enumerate(sizes.tolist())])
