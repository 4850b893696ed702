"""Calls that may run the same captured programs: those with one `Arguments.key`, which straight-line code written for it tells from others.

To make a key and look it up takes as long as the rest of a small call. The code says no wherever it is not sure: a call that it knows has
the key, one that it does not know may have it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from ..client import attention, inserted, leaves, runtime
from ..tensor import Tensor
from .arguments import modes
from .captured import Captured
from .plain import Mismatch

Match = Callable[[tuple[Any, ...], dict[str, Any]], "list[torch.Tensor] | None"]
"""``match(args, kwargs)``: the tensors of a call, as `Arguments.tensors` has them; None if it is not known to have the key."""

#: What a value of these types is, its identity says.
_SINGLE = (bool, type(None), torch.dtype, torch.memory_format)
_EQUAL = (str, bytes, int, torch.device)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Tensors whose identities are compared one by one; more are put in a set.
_PAIRS = 4


class Alike:
    """What has been recorded of the calls with one key, the latest used first.

    ``match`` is None where no code could be written for the key. ``lock`` is around changes.
    """

    __slots__ = ("captured", "match", "_lock")

    def __init__(self, match: Match | None, lock: threading.Lock) -> None:
        self.captured: list[Captured] = []
        self.match = match
        self._lock = lock

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The result of such a call with these tensors; `Mismatch` if none of what was recorded is like it."""
        found: tuple[Any, ...] = ()
        for captured in self.captured:
            if found and not captured.begins(found):
                continue
            try:
                result = captured.run(tensors)
            except Mismatch as mismatch:
                found = mismatch.found or found
                continue
            if captured is not self.captured[0]:  # the next call will most likely be like this one
                with self._lock:
                    self.captured = [captured, *[other for other in self.captured if other is not captured]]
            return result
        raise Mismatch(found)


def match_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Match | None:
    """The function that knows calls like this one, as it is now."""
    writer = _Writer()
    try:
        return writer.write(args, kwargs)
    except _Unsure:
        return None


class _Unsure(Exception):
    """An argument of a kind that is left to `Arguments`."""


class _Writer:
    def __init__(self) -> None:
        self.bound: dict[str, Any] = {"Tensor": Tensor, "requires_grad": torch._C.TensorBase.requires_grad.__get__}  # type: ignore[attr-defined]
        self.lines = ["def match(args, kwargs):"]
        self.conditions: list[str] = []
        #: By the tensor's id: its name.
        self.tensors: dict[int, str] = {}

    def write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Match:
        self.conditions.append(f"len(args) == {len(args)}")
        self.conditions.append(f"tuple(kwargs) == {self.bind(tuple(kwargs))}" if kwargs else "not kwargs")
        self.modes()
        self.items("a", "args", list(args))
        self.items("k", "kwargs.values()", list(kwargs.values()))
        names = list(self.tensors.values())
        if len(names) <= _PAIRS:
            self.conditions += [f"{a} is not {b}" for i, a in enumerate(names) for b in names[:i]]
        else:
            self.conditions.append(f"len({{{', '.join(f'id({name})' for name in names)}}}) == {len(names)}")
        self.decide()
        self.lines.append(f"    return [{', '.join(names)}]")
        exec("\n".join(self.lines), self.bound)
        return self.bound["match"]

    def bind(self, value: Any) -> str:
        name = f"_{len(self.bound)}"
        self.bound[name] = value
        return name

    def decide(self) -> None:
        """Have what was asked for so far decided before what comes next is looked at."""
        if self.conditions:
            self.lines.append(f"    if not ({' and '.join(self.conditions)}): return None")
            self.conditions = []

    def modes(self) -> None:
        """What `modes` gives, asked one by one."""
        grad, inference, autocast, dtype, mesh, keeps, insisted, objects = modes()
        self.conditions += [
            f"{self.bind(torch.is_grad_enabled)}() is {grad}",
            f"{self.bind(torch.is_inference_mode_enabled)}() is {inference}",
            f"{self.bind(torch.get_default_dtype)}() is {self.bind(dtype)}",
            f"{self.bind(runtime.chosen_mesh)}() is {self.bind(mesh)}",
            f"{self.bind(leaves.keeps)}() is {keeps}",
            f"{self.bind(inserted)}.mode == {objects!r}",
        ]
        if autocast or insisted:
            self.conditions.append(f"{self.bind(modes)}() == {self.bind(modes())}")
        else:
            self.conditions.append(f'not {self.bind(torch.is_autocast_enabled)}("cpu")')
            self.conditions.append(f"not {self.bind(attention.insisted)}.get()")

    def items(self, prefix: str, source: str, values: list[Any]) -> None:
        """The values that iterating over ``source`` gives, whose number is a condition already."""
        if not values:
            return
        self.decide()
        names = [f"{prefix}{index}" for index in range(len(values))]
        self.lines.append(f"    {', '.join(names)}, = {source}")
        for name, value in zip(names, values, strict=True):
            self.value(name, value)

    def value(self, name: str, value: Any) -> None:
        kind = type(value)
        if kind is Tensor or kind in _PLAIN:
            self.tensor(name, value, kind)
        elif kind in _SINGLE:
            self.conditions.append(f"{name} is {self.bind(value)}")
        elif kind in _EQUAL:
            self.conditions.append(f"type({name}) is {self.bind(kind)} and {name} == {self.bind(value)}")
        elif kind is float:
            self.conditions.append(f"type({name}) is float and {name}.hex() == {value.hex()!r}")
        elif kind is list or kind is tuple:
            self.conditions.append(f"type({name}) is {kind.__name__} and len({name}) == {len(value)}")
            self.items(f"{name}_", name, list(value))
        elif kind in (dict, OrderedDict) and all(type(key) is str for key in value):
            keys = self.bind(list(value))
            self.conditions.append(
                f"type({name}) is {self.bind(kind)} and list({name}) == {keys} and {{*map(type, {name})}} <= {{str}}"
            )
            self.items(f"{name}_", f"{name}.values()", list(value.values()))
        elif isinstance(value, (int, str, bytes, torch.Tensor, list, tuple, dict)) or kind.__module__ == "numpy":
            raise _Unsure  # of a type derived from those, or told by its contents
        else:
            # Enums, meshes and placements are told by what they equal, other objects by identity, which is enough for all.
            self.conditions.append(f"{name} is {self.bind(value)}")

    def tensor(self, name: str, value: Any, kind: type) -> None:
        if id(value) in self.tensors:
            self.conditions.append(f"{name} is {self.tensors[id(value)]}")
            return
        self.tensors[id(value)] = name
        like = f"type({name}) is {self.bind(kind)} and requires_grad({name}) is {value.requires_grad}"
        if kind is Tensor and value._spec is not None:
            self.conditions.append(f"{like} and {name}._spec is {self.bind(value._spec)}")
            return
        if kind is Tensor:
            like += f" and {name}._spec is None and {name}._host.root.joined is None"
        self.conditions.append(
            f"{like} and {name}.shape == {self.bind(value.shape)} and {name}.stride() == {value.stride()!r} "
            f"and {name}.dtype is {self.bind(value.dtype)}"
        )
