"""Which modules are asked for their mode (``training``) while a call is recorded: that of the others cannot make another call differ."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

_lock = threading.Lock()
#: Those of the recordings that go on now, in whatever thread.
_recordings: list[set[int]] = []


class _Mode:
    """In place of the plain attribute ``training`` of modules."""

    def __get__(self, module: Any, owner: Any = None) -> Any:
        try:
            mode = module.__dict__["training"]
        except KeyError:
            raise AttributeError("training") from None
        for asked in _recordings:
            asked.add(id(module))
        return mode

    def __set__(self, module: Any, mode: Any) -> None:
        module.__dict__["training"] = mode

    def __delete__(self, module: Any) -> None:
        del module.__dict__["training"]


@contextlib.contextmanager
def modes_asked() -> Iterator[set[int]]:
    """Within it, the ids of modules whose mode is asked for, by any thread, come into the set."""
    asked: set[int] = set()
    with _lock:
        _recordings.append(asked)
        torch.nn.Module.training = _Mode()  # type: ignore[assignment]
    try:
        yield asked
    finally:
        with _lock:
            _recordings[:] = [other for other in _recordings if other is not asked]
            if not _recordings:
                del torch.nn.Module.training


def with_mode(modules: list[torch.nn.Module], asked: set[int]) -> list[torch.nn.Module]:
    """Those of the ``modules`` in reach whose mode must stay.

    All, if a module out of reach was asked: it may be a copy of one. Those, too, whose class has an attribute of that name itself.
    """
    if not asked <= set(map(id, modules)):
        return modules
    return [module for module in modules if id(module) in asked or has_own_mode(type(module))]


def has_own_mode(kind: type) -> bool:
    """Whether ``training`` of such a module is not the attribute that all modules have."""
    return any("training" in vars(base) for base in kind.__mro__ if base is not torch.nn.Module)
