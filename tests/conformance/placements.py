"""The ways a sample's tensors are laid over a mesh, written without dtorch so that the harness can be tested alone."""

from __future__ import annotations

from typing import Union

import torch

Code = Union[int, str]
"""One mesh axis of one tensor: the dim that is sharded, ``"r"`` replicated, or ``"p"`` a pending sum."""
Codes = tuple[Code, ...]

MESHES: dict[str, tuple[int, ...]] = {"1": (1,), "2": (2,), "3": (3,), "2x2": (2, 2)}

VARIANTS = ("replicate", "first", "middle", "last", "partial", "mixed", "plain")
"""``mixed``: the inputs take different variants in turn. ``plain``: only the first tensor is distributed, the rest stay plain."""

_IN_TURN = ("first", "last", "replicate", "partial", "middle")


def codes(variant: str, index: int, tensor: torch.Tensor, axes: int) -> Codes | None:
    """How ``tensor``, the ``index``-th of its sample, lies under ``variant`` on a mesh of ``axes``; None: leave it plain."""
    if variant == "plain":
        return codes("first", 0, tensor, axes) if index == 0 else None
    if variant == "mixed":
        variant = _IN_TURN[index % len(_IN_TURN)]
    if variant == "partial" and _adds(tensor.dtype):
        return ("p", 0)[:axes] if tensor.ndim else ("p", "r")[:axes]
    if variant in ("replicate", "partial") or tensor.ndim == 0:
        return ("r",) * axes
    dim = {"first": 0, "middle": tensor.ndim // 2, "last": tensor.ndim - 1}[variant]
    if axes == 1:
        return (dim,)
    other: dict[str, Code] = {"first": dim, "middle": "r", "last": 0}  # twice on one dim, once, and on two dims
    return (other[variant], dim)


def _adds(dtype: torch.dtype) -> bool:
    """Floating or complex, and torch can add it (the eight-bit floats it cannot)."""
    return dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)


def layouts(variants: tuple[str, ...], tensors: list[torch.Tensor], axes: int) -> dict[tuple, str]:
    """Each distinct layout of ``tensors`` under ``variants``, with the name of the first variant that gives it."""
    found: dict[tuple, str] = {}
    for variant in variants:
        found.setdefault(tuple(codes(variant, index, tensor, axes) for index, tensor in enumerate(tensors)), variant)
    return found
