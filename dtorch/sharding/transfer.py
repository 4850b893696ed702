"""Transfer: what one device sends, receives and reduces to bring a tensor from any placements on any mesh to any other."""

from __future__ import annotations

import dataclasses

import torch

from .layout import Box


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of one device's local source tensor, and where it goes in the result."""

    device: int
    source: Box
    target: Box


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One device's part of a transfer.

    Args:
        device: this device.
        group: the devices that take part, sorted; just this device if it needs nobody and nobody needs it.
        publishes: another device reads this one's local source tensor.
        shape: the local shape of the result; None if this device gets none.
        dtype: of source and result.
        terms: each a tuple of pieces to be put together; their reduction, in this order, is the result. None at all: zeros.
        zeros: the pieces do not cover the result; the rest is zeros.
        reduce_op: one of `dtorch.placement.REDUCE_OPS`.
    """

    device: int
    group: tuple[int, ...]
    publishes: bool
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    terms: tuple[tuple[Piece, ...], ...]
    zeros: bool
    reduce_op: str
