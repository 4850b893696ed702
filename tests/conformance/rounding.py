"""How far a half-precision result may be off because a reduction in it was split over devices.

Plain torch adds ``y = p₁ + … + pₙ`` in float32 and rounds y once. Where device i holds pᵢ, each pᵢ is rounded to the half type, then
they are added, rounding at most n − 1 times, and what comes of it is rounded. With u half the type's epsilon, that is an error of
at most (n + 1)·u·Σ|pᵢ| to first order, which is far more than u·|y| where the pᵢ cancel (N. Higham, Accuracy and Stability of Numerical
Algorithms, 2002, 4.2). The pᵢ are inside the op; but pᵢ is by how much y changes, per unit, when the i-th block of what is
summed is scaled by 1 + ε. So Σ|pᵢ| is measured in float64, for every way of cutting a tensor into one block a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

STEP = 1e-6
HALVES = (torch.bfloat16, torch.float16)

Run = Callable[[int, torch.Tensor | None], Any]
"""Makes the call in float64, with the tensor placed as the given one scaled by the given factors; None: nothing scaled."""


def allowance(
    run: Run, placed: list[torch.Tensor], mesh_shape: tuple[int, ...], pending: bool
) -> list[torch.Tensor | None]:
    """For each leaf of the result: (n + 1)·Σ|pᵢ|/2, for the split where it is largest; times epsilon it is the error allowed.

    Args:
        placed: the tensors that the call places, in order.
        pending: some came as a pending sum, whose addends (`adapters.DtorchAdapter._spread`) are up to 2n − 1 times as large.
    """
    truth = tree_flatten(run(0, None))[0]
    largest: list[torch.Tensor | None] = [torch.zeros_like(leaf) if _measured(leaf) else None for leaf in truth]
    for index, tensor in enumerate(placed):
        if not tensor.is_floating_point() or tensor.numel() == 0:
            continue
        for dims in itertools.product(range(tensor.ndim), repeat=len(mesh_shape)) if tensor.ndim else [()]:
            total = [one if one is None else torch.zeros_like(one) for one in largest]
            for up, down in _blocks(tensor, mesh_shape, dims):
                results = [tree_flatten(run(index, scale))[0] for scale in (up, down)]
                for k, (leaf, high, low) in enumerate(zip(truth, *results, strict=True)):
                    if total[k] is not None and high.shape == low.shape == leaf.shape:
                        total[k] += _slope(leaf, high, low)
            largest = [one if one is None else torch.maximum(one, new) for one, new in zip(largest, total, strict=True)]
    devices = torch.Size(mesh_shape).numel()
    factor = (devices + 1) / 2 * (2 * max(mesh_shape) - 1 if pending else 1)
    return [one if one is None else one * factor for one in largest]


def _measured(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64


def _blocks(
    tensor: torch.Tensor, mesh_shape: tuple[int, ...], dims: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Factors that scale one device's block up, and down, for each device; the whole of a tensor without dims."""
    scales = [torch.ones(tensor.shape, dtype=torch.float64) for _ in range(2)]
    pairs = [tuple(scales)]
    for parts, dim in zip(mesh_shape, dims, strict=False):
        pairs = [pair for up, down in pairs for pair in zip(up.chunk(parts, dim), down.chunk(parts, dim), strict=True)]
    for up, down in pairs:
        up.fill_(1 + STEP)
        down.fill_(1 - STEP)
        yield tuple(scales)  # type: ignore[misc]
        up.fill_(1)
        down.fill_(1)


def _slope(leaf: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """|pᵢ|; nothing where the result jumps (a maximum that moves elsewhere), for there it is no addend."""
    up, down = high.detach() - leaf, leaf - low.detach()
    smooth = (up - down).abs() <= 0.1 * torch.maximum(up.abs(), down.abs())
    return torch.where(smooth, (up + down).abs() / (2 * STEP), 0.0)
