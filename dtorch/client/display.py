"""What ``print(x)`` shows: the values as torch would, then shape, dtype, mesh and placements."""

from __future__ import annotations

import torch

from ..tensor import Tensor
from . import torch_internals

PREFIX = "tensor("


def text(tensor: Tensor) -> str:
    """Summarised as torch does, without fetching all of a large tensor."""
    options = torch_internals.print_options
    if tensor.numel() > options.threshold:
        with torch.no_grad():
            plain = _edges(tensor.detach(), options.edgeitems).to_torch()
        body = _summarised(plain)
    else:
        plain = tensor.to_torch()
        body = torch_internals.format_values(plain, len(PREFIX))
    parts = [body, f"shape={tuple(tensor.shape)}", f"dtype={tensor.dtype}", f"device_mesh={tensor.device_mesh!r}"]
    parts.append(f"placements={tensor.placements!r}")
    if tensor.grad_fn is not None:
        parts.append(f"grad_fn=<{type(tensor.grad_fn).__name__}>")
    elif tensor.requires_grad:
        parts.append("requires_grad=True")
    return PREFIX + ", ".join(parts) + ")"


def _edges(x: torch.Tensor, items: int) -> torch.Tensor:
    """The first and last ``items`` of every dim and one in between, which stands for what is left out."""
    for dim, size in enumerate(x.shape):
        if size > 2 * items + 1:
            x = torch.cat([x.narrow(dim, 0, items + 1), x.narrow(dim, size - items, items)], dim)
    return x


def _summarised(plain: torch.Tensor) -> str:
    options = torch_internals.print_options
    threshold = options.threshold
    options.threshold = 0
    try:
        return torch_internals.format_values(plain, len(PREFIX))
    finally:
        options.threshold = threshold
