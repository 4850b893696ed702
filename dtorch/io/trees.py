"""Nested Python data as JSON beside its tensors: what state dicts are made of, and nothing that would need a pickle.

A list is ``{"list": [...]}`` and so on, so that types and keys that JSON lacks come back as they were; a tensor is
``{"tensor": name in the safetensors, "placed": whether it lived on workers}``.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ..raw import dtype_called, dtype_name
from .transfers import is_placed

Path = tuple[Any, ...]
"""The keys and indices that lead to an item."""

SCALARS = (type(None), bool, int, float, str)
SEQUENCES: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
MAPPINGS: dict[str, type] = {
    "dict": dict,
    "ordered": collections.OrderedDict,
    "counter": collections.Counter,
}
_NAMES = {kind: name for table in (SEQUENCES, MAPPINGS) for name, kind in table.items()} | {
    torch.Size: "tuple",
    collections.defaultdict: "dict",
}


class Writer:
    """Turns data into JSON and collects its tensors; one that comes twice is kept once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[Any, str] = {}

    def write(self, data: Any, path: Path) -> Any:
        """``data`` as JSON.

        Raises:
            TypeError: something that neither JSON nor safetensors can hold; it says where.
        """
        if type(data) in SCALARS:
            return data
        if isinstance(data, torch.Tensor):
            return {"tensor": self._name(data, path), "placed": is_placed(data)}
        name = _NAMES.get(type(data))
        if name in SEQUENCES:
            return {name: [self.write(item, (*path, i)) for i, item in enumerate(data)]}
        if name in MAPPINGS:
            return {name: [[self.write(key, path), self.write(item, (*path, key))] for key, item in data.items()]}
        if isinstance(data, numpy.ndarray) and data.dtype.kind in "biuf":
            return {"array": self._name(torch.from_numpy(numpy.ascontiguousarray(data)), path)}
        if isinstance(data, numpy.generic) and data.dtype.kind in "biuf":
            return {"number": [data.dtype.str, data.item()]}
        if isinstance(data, torch.dtype):
            return {"dtype": dtype_name(data)}
        if type(data) is complex:
            return {"complex": [data.real, data.imag]}
        raise TypeError(
            f"save_state(): {dotted(path)} is a {type(data).__name__}, which cannot be kept; numbers, strings, tensors can, and lists, "
            "tuples, sets and dicts of them"
        )

    def _name(self, tensor: torch.Tensor, path: Path) -> str:
        value = getattr(tensor, "_value", None)
        key = id(tensor) if value is None else (value.id, tensor._spec)  # type: ignore[attr-defined]
        found = self._seen.get(key)
        if found is None:
            found = dotted(path)
            while found in self.tensors:
                found += "_"
            self.tensors[found] = tensor
            self._seen[key] = found
        return found


def read(data: Any, path: Path, tensor_of: Callable[[Path, str, bool], torch.Tensor]) -> Any:
    """The inverse of `Writer.write`; ``tensor_of(path, name, placed)`` makes the tensors."""
    if type(data) in SCALARS:
        return data
    (name, content), *_ = data.items()
    if name == "tensor":
        return tensor_of(path, content, data["placed"])
    if name in SEQUENCES:
        return SEQUENCES[name](read(item, (*path, i), tensor_of) for i, item in enumerate(content))
    if name in MAPPINGS:
        items = [(read(key, path, tensor_of), item) for key, item in content]
        return MAPPINGS[name]({key: read(item, (*path, key), tensor_of) for key, item in items})
    if name == "array":
        return tensor_of(path, content, False).numpy()  # it shares the memory that is filled
    if name == "number":
        return numpy.dtype(content[0]).type(content[1])
    if name == "dtype":
        return dtype_called(content)
    if name == "complex":
        return complex(*content)
    raise ValueError(f"{dotted(path)} is of an unknown kind, {name!r}")


def dotted(path: Path) -> str:
    return ".".join(map(str, path))
