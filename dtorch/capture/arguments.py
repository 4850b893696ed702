"""What of a call decides which captured program it may run: its arguments and the modes that torch is in."""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Any

import numpy
import torch

from ..client import attention, inserted, leaves, runtime
from ..mesh import DeviceMesh
from ..placement import Placement
from ..tensor import Tensor

_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]
VALUES = (
    str,
    bytes,
    bool,
    int,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    enum.Enum,
    DeviceMesh,
    Placement,
)
CONTAINERS = (list, tuple, dict, OrderedDict)


class Unsupported(Exception):
    """A call that cannot be captured, and why."""


class Arguments:
    """The arguments of one call, flattened.

    ``tensors`` are their tensors, in order, each handle once. ``objects`` are what is known by identity: modules, caches, functions.
    ``key`` is what two calls must share.
    """

    __slots__ = ("key", "tensors", "objects", "_indices")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self._indices: dict[int, int] = {}
        self.key: tuple[Any, ...] = (
            tuple([self._key(value) for value in args]),
            tuple([(name, self._key(value)) for name, value in kwargs.items()]) if kwargs else (),
            modes(),
        )

    def _key(self, value: Any) -> Any:
        kind = type(value)
        if kind is Tensor:
            seen = self._indices.get(id(value))
            if seen is not None:
                return "the same as", seen
            self._indices[id(value)] = len(self.tensors)
            self.tensors.append(value)
            if value._spec is not None:
                return value._spec, _requires_grad(value)
            if value._host.root.joined is not None:
                raise Unsupported("an argument is a view of a tensor that has joined a mesh")
            return "uncommitted", value.shape, value.stride(), value.dtype, _requires_grad(value)
        if isinstance(value, VALUES):
            return kind, value
        if kind is float:
            return kind, value.hex()
        if kind in (list, tuple):
            return kind, tuple([self._key(item) for item in value])
        if kind in (dict, OrderedDict):
            return kind, tuple([(type(k), k, self._key(item)) for k, item in value.items()])
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            seen = self._indices.get(id(value))
            if seen is not None:
                return "the same as", seen
            self._indices[id(value)] = len(self.tensors)
            self.tensors.append(value)
            return kind, value.shape, value.stride(), value.dtype, value.requires_grad
        if isinstance(value, torch.Tensor):
            raise Unsupported(f"an argument is a {kind.__name__}")
        if isinstance(value, numpy.generic):
            return kind, value.tobytes()
        if isinstance(value, numpy.ndarray):
            raise Unsupported("an argument is a numpy array: give it as a tensor")
        self.objects.append(value)
        return kind, id(value)


def modes() -> tuple[Any, ...]:
    """What torch and dtorch are set to."""
    autocast = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast and (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        torch.get_default_dtype(),
        runtime.chosen_mesh(),
        leaves.keeps(),
        tuple(attention.insisted.get().items()),
        inserted.mode,
    )
