"""What a tensor without memory in this process refuses, and what to use instead.

Left to torch, some of these crash the process (``share_memory_``, a null pointer in a dlpack capsule, ``torch.export``) and some answer
wrongly (``storage_offset`` of a view).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import hints
from . import torch_internals

NEEDS_MEMORY = {
    "data_ptr": "use x.to_torch() or x.local_shards()",
    "storage": "use x.to_torch() or x.local_shards(); dtorch.io.save writes safetensors",
    "is_set_to": "compare x.to_torch() and y.to_torch(), or the objects with `is`",
    "share_memory_": "other processes get its values by pickle, or as x.to_torch().share_memory_()",
    "pin_memory": "its values are on the workers already; pin the plain tensor it is made of",
    "__dlpack__": "exchange x.to_torch() or x.local_shards() through dlpack",
    "__dlpack_device__": "exchange x.to_torch() or x.local_shards() through dlpack",
}

#: What the tensor of a process of an SPMD program has → what to use where one program runs all.
SPMD = {
    "to_local": "x.local_shards() has what each device holds, x.to_torch() the whole",
    "from_local": "dtorch.from_torch(whole, mesh, placements) places a whole tensor",
}

TRACING = (
    "torch.compile, torch.export and torch.func.linearize cannot trace dtorch tensors: dtorch.compile runs a function or module with one "
    "command to the workers; or call it as it is (Python runs ahead of the workers; torch.func.jvp for linearize), or give it plain tensors"
)


def install(cls: type[torch.Tensor]) -> None:
    """Have ``cls`` refuse."""
    for name, advice in NEEDS_MEMORY.items():
        setattr(cls, name, _refusal(name, advice))
    cls.storage_offset = _storage_offset  # type: ignore[method-assign, assignment]
    for name, advice in SPMD.items():
        setattr(cls, name, _Absent(name, advice))
    ours = tuple(
        [name for name in vars(cls) if not name.startswith("_") and name not in NEEDS_MEMORY and name not in SPMD]
    )
    cls.__getattr__ = _says_what_is_near(ours)  # type: ignore[attr-defined]
    cls.__tensor_flatten__ = property(_refuse_tracing)  # type: ignore[attr-defined]
    torch_internals.refuse_dlpack(cls)


class _Absent:
    """An attribute that is not there, with a word of why."""

    def __init__(self, name: str, advice: str) -> None:
        self._text = f"a dtorch tensor has no {name!r}: one program runs all devices; {advice}"

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError(self._text)


def _says_what_is_near(ours: tuple[str, ...]) -> Any:
    """A ``__getattr__``, which is asked for what is not there. (Python's own hint leaves out classes with so many names.)"""

    @functools.lru_cache(256)
    def hint_for(name: str) -> str:
        return "" if name.startswith("_") else hints.near(name, ours)

    def missing(self: Any, name: str) -> Any:
        try:
            return object.__getattribute__(self, name)
        except AttributeError as error:
            if hint_for(name) and not any(name in vars(kind) for kind in type(self).__mro__):
                raise AttributeError(f"{error}{hint_for(name)}") from None
            raise

    return missing


def _refusal(name: str, advice: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch_internals.is_tracing():
            raise TypeError(TRACING)
        raise RuntimeError(f"{name}: a dtorch tensor has no memory in this process: {advice}")

    refuse.__name__ = name
    return refuse


def _storage_offset(self: Any) -> int:
    """0 for a tensor that fills its storage; where a view lies in its base is not known here."""
    if self._spec is None and self._host is not None:
        return self._host.plain.storage_offset()
    if self.untyped_storage().nbytes() == self.nbytes:
        return 0
    return _refusal("storage_offset", "a view's place in its base is not known here; index the base instead")(self)


def _refuse_tracing(self: Any) -> Any:
    """``torch.compile`` and ``torch.export`` ask for this first of all; they cannot trace work that is done elsewhere."""
    if torch_internals.is_tracing():
        raise TypeError(TRACING)
    raise AttributeError("__tensor_flatten__")
