"""Gradients that reach a leaf are brought to the leaf's placements as they are accumulated.

Otherwise training with sharded weights would hold full-size pending gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

_state = threading.local()
#: Hooks that `watch` has registered.
_own_hooks = 0


class Leaf:
    """The gradient hook of one leaf. Knows the leaf's spec, not the leaf, so that it makes no reference cycle."""

    __slots__ = ("spec",)

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __call__(self, grad: Any) -> Any:
        spec, own = self.spec, getattr(grad, "_spec", None)
        if spec is not None and type(grad) is torch.Tensor and not grad.numel() and not spec.has_partial:
            from . import host

            return host.from_plain(grad, spec.mesh, spec.placements)  # torch's own, for an empty tensor in a cat (2.13)
        if spec is None or own is None or (own.mesh is spec.mesh and own.placements == spec.placements):
            return None
        if getattr(_state, "keep", False) or spec.has_partial:
            return None
        return _brought(grad, spec)


def watch(tensor: Any) -> None:
    """Have the gradients of a leaf brought to its placements."""
    if tensor.is_leaf and tensor._leaf is None:
        tensor._leaf = Leaf(tensor._spec)
        tensor.register_hook(tensor._leaf)
        tensor.register_post_accumulate_grad_hook(settle)
        global _own_hooks
        _own_hooks += 2


def hooks_of_others() -> int:
    """A number that grows with every hook that is registered anywhere, but for those of `watch`."""
    return RemovableHandle.next_id - _own_hooks


def settle(tensor: Any) -> None:
    """Bring a gradient that `no_sync` has left as it was to the leaf's placements, when one is accumulated outside of it."""
    spec, grad = tensor._spec, tensor.grad
    own = getattr(grad, "_spec", None)
    if (
        spec is None
        or own is None
        or own.placements == spec.placements
        or spec.has_partial
        or getattr(_state, "keep", False)
    ):
        return
    tensor.grad = _brought(grad, spec)


def _brought(grad: Any, spec: Any) -> Any:
    """``grad`` at the mesh and placements of its leaf."""
    from . import redistribute

    if grad.requires_grad:  # create_graph
        return grad.redistribute(spec.mesh, spec.placements)
    own = grad._spec
    return redistribute.move(
        grad, type(own).of(spec.mesh, spec.placements, own.shape, own.stride, own.dtype), "gradient"
    )


def keeps() -> bool:
    """Whether `no_sync` is on in this thread."""
    return getattr(_state, "keep", False)


@contextmanager
def no_sync() -> Iterator[None]:
    """Within it, gradients of leaves stay as backward makes them: pending sums are accumulated without communication."""
    before = getattr(_state, "keep", False)
    _state.keep = True
    try:
        yield
    finally:
        _state.keep = before
