"""What a tensor without memory in this process refuses, and what to use instead.

Left to torch, some of these crash the process (``share_memory_``, a null pointer in a dlpack capsule, ``torch.export``) and some answer
wrongly (``storage_offset`` of a view).
"""

from __future__ import annotations

from typing import Any

import torch

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

#: What others call it → our name.
OTHER_NAMES = {"mesh": "device_mesh", "placement": "placements", "shards": "local_shards"}

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
        setattr(cls, name, _Absent(f"a dtorch tensor has no {name!r}: one program runs all devices; {advice}"))
    for name, meant in OTHER_NAMES.items():
        setattr(cls, name, _Absent(f"{cls.__name__!r} object has no attribute {name!r}; did you mean {meant!r}?"))
    cls.__dir__ = _public_names  # type: ignore[method-assign, assignment]
    cls.__tensor_flatten__ = property(_refuse_tracing)  # type: ignore[attr-defined]
    torch_internals.refuse_dlpack(cls)


class _Absent:
    """An attribute that is not there, with a word of why."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: Any, owner: Any) -> Any:
        raise AttributeError(self._text)


def _public_names(self: torch.Tensor) -> list[str]:
    """For ``dir``: what is there. Without private names there are few enough for Python to say what was meant by a misspelt one (750).

    A ``__getattr__`` that said so would cost each op 3 %: torch looks for attributes of a subclass again and again.
    """
    absent = SPMD.keys() | OTHER_NAMES.keys()
    names = torch.Tensor.__dir__(self)
    return [name for name in names if (not name.startswith("_") or name.startswith("__")) and name not in absent]


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
