"""Handles: the tensors that Python holds on values of the workers."""

from __future__ import annotations

from typing import Any

import torch

from ..sharding.spec import Spec
from ..tensor import Tensor
from . import torch_internals
from .torch_internals import make_wrapper
from .values import Value

#: Another object whenever a handle comes to refer to something else: what was known of handles may no longer hold.
version = object()


def rebound() -> None:
    """Tell that a handle has come to refer to something else, having done so."""
    global version
    version = object()


torch_internals.tell_of_swaps(rebound)


def wrap(spec: Spec, value: Value) -> Tensor:
    """A new handle."""
    tensor = make_wrapper(*(spec.handle or describe(spec)))
    tensor._spec = spec
    tensor._value = value
    return tensor


def describe(spec: Spec) -> tuple:
    """What `make_wrapper` makes handles of this spec with; the spec keeps it."""
    spec.handle = torch_internals.wrapper_arguments(Tensor, spec.shape, spec.stride, spec.dtype)
    return spec.handle


def wrap_view(spec: Spec, value: Value, base: Tensor) -> Tensor:
    """A new handle that torch knows to alias ``base``."""
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):  # a view of a normal tensor shares its version counter
            view = wrap(spec, value)
    else:
        view = wrap(spec, value)
    torch_internals.share_storage(view, base)
    return view


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    _collect((value,), found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
