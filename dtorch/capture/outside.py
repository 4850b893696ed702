"""Where the tensors are that a function may use without getting them as arguments: modules, closures, globals, optimizers.

A captured program reads them anew at every call, by where they were when it was recorded. A place is an `Edge`, from a dict, a list, a
closure's cell or a tensor (whose gradient it is) to a child. Every edge on a way to a used tensor must still lead to the same object, or
what the program reads would not be what the function would.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

#: Objects that are looked at, at most.
LIMIT = 200_000

#: torch's own getter, past the properties of our class.
grad_of = torch._C.TensorBase.grad.__get__  # type: ignore[attr-defined]

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "dtorch", "_pytest", "pytest", "pluggy"))
#: What has no edge, because whoever refers to it refers to that for ever.
FIXED = "fixed"


class Edge(NamedTuple):
    """``kind`` is ``"dict"``, ``"item"`` (of a list), ``"attribute"`` (of a cell, a slot or a class), ``"grad"`` or `FIXED`."""

    kind: str
    container: Any
    key: Any

    def get(self) -> Any:
        """The child; None where there is none (any more)."""
        if self.kind == "dict":
            return dict.get(self.container, self.key)
        if self.kind == "item":
            return self.container[self.key] if self.key < len(self.container) else None
        if self.kind == "grad":
            return grad_of(self.container)
        try:
            return getattr(self.container, self.key)
        except (AttributeError, ValueError):  # an empty cell
            return None

    def put(self, child: Any) -> None:
        """Put ``child`` there; None takes a gradient away."""
        if self.kind in ("dict", "item"):
            self.container[self.key] = child
        elif self.kind == "grad":
            self.container.grad = child
        else:
            setattr(self.container, self.key, child)

    def __str__(self) -> str:
        if self.kind == "item":
            return f"item {self.key} of a list"
        if self.kind == "grad":
            return "a gradient"
        return "a variable of the function around it" if self.key == "cell_contents" else repr(self.key)

    @property
    def place(self) -> tuple[Any, ...]:
        """The edge by identity."""
        key = self.key if isinstance(self.key, (str, int)) else id(self.key)
        return self.kind, id(self.container), key


class Outside:
    """Everything that can be reached from ``roots`` now."""

    def __init__(self, roots: list[Any]) -> None:
        self.edges: dict[tuple[Any, ...], tuple[Edge, Any]] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.modules: list[torch.nn.Module] = []
        self.is_complete = True
        #: By a child's id: the places that lead to it (None: what never changes), each with the id of the parent.
        self._parents: dict[int, list[tuple[Any, int]]] = {}
        self._seen: dict[int, Any] = {}
        queue: collections.deque[Any] = collections.deque()

        def visit(child: Any) -> None:
            if id(child) in self._seen:
                return
            self._seen[id(child)] = child
            if isinstance(child, torch.Tensor):
                self.tensors[id(child)] = child
            elif isinstance(child, torch.nn.Module):
                self.modules.append(child)
            queue.append(child)

        for root in roots:
            visit(root)
        while queue:
            parent = queue.popleft()
            for edge, child in _edges_of(parent):
                if isinstance(child, _PLAIN):
                    continue
                place = None
                if edge.kind != FIXED:
                    place = edge.place
                    self.edges[place] = edge, child
                self._parents.setdefault(id(child), []).append((place, id(parent)))
                visit(child)
            if len(self._seen) > LIMIT:
                self.is_complete = False
                return

    def ways(self, used: list[Any]) -> list[tuple[Edge, Any]]:
        """Every edge that lies on a way to one of ``used``, with its child."""
        found: dict[tuple[Any, ...], tuple[Edge, Any]] = {}
        pending = [id(one) for one in used]
        seen = set(pending)
        while pending:
            for place, parent in self._parents.get(pending.pop(), ()):
                if place is not None:
                    found[place] = self.edges[place]
                if parent not in seen:
                    seen.add(parent)
                    pending.append(parent)
        return list(found.values())

    def contents(self) -> list[tuple[Any, list[Any]]]:
        """Every list and dict that can be reached, with what is in it."""
        return [(one, contents_of(one)) for one in self._seen.values() if isinstance(one, (list, dict))]

    def every(self) -> Iterable[Any]:
        """Every object that can be reached."""
        return self._seen.values()

    def saw(self, one: Any) -> bool:
        """Whether ``one`` can be reached."""
        return id(one) in self._seen


def contents_of(container: list[Any] | dict[Any, Any]) -> list[Any]:
    """What is in a list; the keys and values of a dict."""
    return list(container) if isinstance(container, list) else [*container, *container.values()]


_MODULE_DICTS = ("_parameters", "_buffers", "_modules")


def _edges_of(parent: Any) -> Iterator[tuple[Edge, Any]]:
    if isinstance(parent, torch.Tensor):
        if parent.is_leaf and parent.requires_grad:
            grad = grad_of(parent)
            if grad is not None:
                yield Edge("grad", parent, None), grad
    elif isinstance(parent, dict):
        for key, child in list(parent.items()):
            yield Edge("dict", parent, key), child
        if type(parent) not in _DICTS:
            yield from _attributes(parent)
    elif isinstance(parent, (list, tuple, collections.deque)):
        for index, child in enumerate(list(parent)):
            yield Edge("item", parent, index), child
    elif isinstance(parent, types.FunctionType):
        yield from _of_function(parent)
    elif isinstance(parent, types.MethodType):
        yield Edge(FIXED, parent, None), parent.__self__
        yield Edge(FIXED, parent, None), parent.__func__
    elif isinstance(parent, functools.partial):
        for child in (parent.func, parent.args, parent.keywords):
            yield Edge(FIXED, parent, None), child
    elif isinstance(parent, type):
        if not _is_library(parent.__module__):
            for name, child in list(vars(parent).items()):
                if isinstance(child, (torch.Tensor, list, dict, torch.nn.Module)):
                    yield Edge("attribute", parent, name), child
    elif isinstance(parent, torch.jit.ScriptModule):
        return  # whoever records a call refuses it
    elif isinstance(parent, torch.nn.Module):
        for name in _MODULE_DICTS:
            for key, child in list(parent.__dict__[name].items()):
                yield Edge("dict", parent.__dict__[name], key), child
        yield from _attributes(parent, _MODULE_DICTS)
    elif isinstance(parent, (torch.optim.Optimizer, torch.amp.GradScaler)) or not _is_library(type(parent).__module__):
        yield from _attributes(parent)


_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


def _attributes(parent: Any, without: tuple[str, ...] = ()) -> Iterator[tuple[Edge, Any]]:
    """The attributes of an object, and what its class's functions refer to."""
    own = getattr(parent, "__dict__", None)
    if type(own) is dict:
        for name, child in list(own.items()):
            if name not in without:
                yield Edge("dict", own, name), child
    for cls in type(parent).__mro__:
        if _is_library(cls.__module__):
            continue
        for name in cls.__dict__.get("__slots__", ()):
            child = getattr(parent, name, None)
            if child is not None:
                yield Edge("attribute", parent, name), child
        for member in list(vars(cls).values()):
            function = member.fget if isinstance(member, property) else member
            function = function.__func__ if isinstance(function, (staticmethod, classmethod)) else function
            if isinstance(function, types.FunctionType):
                yield Edge(FIXED, cls, None), function
        yield Edge(FIXED, cls, None), cls


def _of_function(function: types.FunctionType) -> Iterator[tuple[Edge, Any]]:
    for cell in function.__closure__ or ():
        try:
            yield Edge("attribute", cell, "cell_contents"), cell.cell_contents
        except ValueError:  # empty
            continue
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield Edge(FIXED, function, None), default
    if function.__dict__:
        for name, child in list(function.__dict__.items()):
            yield Edge("dict", function.__dict__, name), child
    if _is_library(function.__module__ or ""):
        return
    names = _names(function.__code__)
    known = function.__globals__
    for name in names:
        child = known.get(name)
        if isinstance(child, types.ModuleType):
            if not _is_library(child.__name__):
                for inner in names & vars(child).keys():
                    yield Edge("dict", vars(child), inner), vars(child)[inner]
        elif child is not None:
            yield Edge("dict", known, name), child


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names that code, and what is defined inside it, may look up."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _is_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES
