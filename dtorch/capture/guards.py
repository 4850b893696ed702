"""What must be outside of a function for its captured call to be used again: a check of many places that costs little.

A place that has never changed is compared by identity, in straight-line code written for that, which asks modules for their mode as well; a
place that changes, as a gradient does, is looked up at every call. One that is seen to change for the first time moves from the former to
the latter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..client import leaves, torch_internals
from ..tensor import Tensor
from .asked import has_own_mode
from .outside import Edge, grad_of
from .plain import Mismatch

#: What stands for a place that held no tensor and nothing that holds one: None, a number, or nothing at all.
NOTHING: Any = object()
#: What stands for a place that held a tensor which was not used.
ANY_TENSOR: Any = object()

#: Conditions in one function of straight-line code. More, and its arguments no longer fit the short form of an instruction.
AT_ONCE = 100

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_backward_hooks = torch._C.TensorBase._backward_hooks.__get__  # type: ignore[attr-defined]
_accumulated_hooks = torch._C.TensorBase._post_accumulate_grad_hooks.__get__  # type: ignore[attr-defined]


class Guards:
    """Places outside of the function and what is there: objects that must stay, tensors that must stay of their kind.

    Args:
        ways: the places, each with its child.
        modules: the modules in reach, whose children and hooks must stay.
        asked: those of them whose mode must.
        written: the places where the function puts another tensor at every call.
    """

    def __init__(
        self,
        ways: list[tuple[Edge, Any]],
        modules: list[torch.nn.Module],
        asked: list[torch.nn.Module],
        written: set[tuple[Any, ...]],
    ) -> None:
        def moves(edge: Edge, child: Any) -> bool:
            if child is NOTHING or child is ANY_TENSOR:
                return True
            return edge.place in written and isinstance(child, torch.Tensor)

        grads = [way for way in ways if way[0].kind == "grad"]
        others = [way for way in ways if way[0].kind != "grad"]
        moving = [*grads, *[way for way in others if moves(*way)]]
        #: The dicts of modules' children, and copies of them, to be compared as they are: modules are equal if they are the same.
        self._children = [m._modules for m in modules if _is_compared(m)]
        self._copies = list(map(dict, self._children))
        compared = {id(children) for children in self._children}
        others += [way for way in _structure(modules) if way[0].place not in {edge.place for edge, _ in others}]
        fixed = [way for way in others if not moves(*way) and id(way[0].container) not in compared]
        self.edges = [edge for edge, _ in (*moving, *fixed)]
        #: How many places, from the first on, are looked up at every call. What is there is not held on to.
        self.moving = len(moving)
        #: Tensors whose gradients are read or written: each has to stay itself.
        self._owners = [edge.container for edge, _ in grads]
        self._kinds = [_kinds_of(child) for _, child in moving]
        self._types: list[type] = []
        #: What is at the other places.
        self.fixed = [child for _, child in fixed]
        #: Those of them that have been seen to change, by position.
        self.loose: dict[int, Edge] = {}
        self._modes = [(module, bool(module.training)) for module in asked]
        self._same: Callable[[], bool]
        self._write()
        self._hooks = [getattr(module, kind) for module in modules for kind in _HOOKS]
        self._hooks += [getattr(torch.nn.modules.module, f"_global{kind}") for kind in _HOOKS]
        self._hooked = [child for _, child in ways if isinstance(child, torch.Tensor)]
        self._newest_hook = RemovableHandle.next_id
        self._hooks_made = leaves.hooks_of_others()
        self._ties: list[tuple[int, int]] = []
        self._given: list[tuple[int, int]] = []
        self._used_hooks = [hooks for hooks in self._every_hook() if hooks]
        self._hook_counts = list(map(len, self._used_hooks))

    def tie(self, ways: list[tuple[Edge, Any]], arguments: dict[int, int]) -> None:
        """Have what is one tensor, in several places or also an argument (by id: its index), be one in every call."""
        at = {edge.place: i for i, edge in enumerate(self.edges)}
        places: dict[int, list[int]] = {}
        for edge, child in ways:
            if isinstance(child, torch.Tensor):
                places.setdefault(id(child), []).append(at[edge.place])
        #: Pairs of places.
        self._ties = [(first, other) for first, *others in places.values() for other in others]
        #: Arguments by index, each with a place.
        self._given = [(arguments[child], found[0]) for child, found in places.items() if child in arguments]

    def find(self, tensors: list[torch.Tensor]) -> list[Any]:
        """What is at the places that move, the others being as they must be; or `Mismatch`. ``tensors``: those of the arguments."""
        try:
            same = self._same()
        except (LookupError, AttributeError, ValueError):  # the last: an empty cell
            same = False
        if not same:
            self._loosen()
        for at, edge in self.loose.items():
            child = edge.get()
            if type(child) is not type(self.fixed[at]):
                raise Mismatch
            self.fixed[at] = child
        if self._copies != self._children:
            raise Mismatch
        if self._used_hooks and list(map(len, self._used_hooks)) != self._hook_counts:
            raise Mismatch
        if self._hooks_made != leaves.hooks_of_others():
            self._look_for_hooks()
        moved = self._moved() if self.moving else []
        if self._given or (self._ties and (self.moving or self.loose)):
            count, fixed = self.moving, self.fixed

            def child(at: int) -> Any:
                return moved[at] if at < count else fixed[at - count]

            if any(child(one) is not child(other) for one, other in self._ties):
                raise Mismatch
            if any(tensors[index] is not child(at) for index, at in self._given):
                raise Mismatch
        return moved

    def _write(self) -> None:
        """Write the function that compares what has never changed."""
        edges = enumerate(self.edges[self.moving :])
        still = [(edge, self.fixed[at]) for at, edge in edges if at not in self.loose]
        code = _Conditions()
        for edge, child in still:
            code.place(edge, child)
        for module, is_training in self._modes:
            code.mode(module, is_training)
        self._same = code.function()

    def _loosen(self) -> None:
        """Find the places that have changed, to look them up from now on; if it is not that, `Mismatch`."""
        if any(bool(module.training) is not is_training for module, is_training in self._modes):
            raise Mismatch
        owners = set(map(id, self._owners))
        loose = dict(self.loose)
        for at, edge in enumerate(self.edges[self.moving :]):
            child, expected = edge.get(), self.fixed[at]
            if child is expected or at in loose:
                continue
            if not isinstance(expected, torch.Tensor) or type(child) is not type(expected) or id(expected) in owners:
                raise Mismatch
            loose[at] = edge
        self.loose = loose
        self._write()

    def _moved(self) -> list[Any]:
        with torch_internals.past_functions():
            found = list(map(grad_of, self._owners))
        found += [edge.get() for edge in self.edges[len(found) : self.moving]]
        types = list(map(type, found))
        if types != self._types:
            if not all(map(operator.contains, self._kinds, types)):
                raise Mismatch
            self._types = types
        return found

    def _look_for_hooks(self) -> None:
        """Somebody has added hooks somewhere."""
        newest, made = RemovableHandle.next_id, leaves.hooks_of_others()
        if any(id >= self._newest_hook for hooks in self._every_hook() for id in hooks or ()):
            raise Mismatch
        self._newest_hook, self._hooks_made = newest, made

    def _every_hook(self) -> list[Any]:
        with torch_internals.past_functions():
            return [*self._hooks, *map(_backward_hooks, self._hooked), *map(_accumulated_hooks, self._hooked)]


def _kinds_of(child: Any) -> tuple[type, ...]:
    """The types of what may be at a place that moves."""
    if child is NOTHING:
        return type(None), int, float, str, bool
    return (Tensor if child is ANY_TENSOR else type(child),)


def _is_compared(module: torch.nn.Module) -> bool:
    children = module._modules
    if not children and not isinstance(module, _CONTAINERS):  # one more that nobody knows of
        return False
    return type(children) is dict and all(type(child).__eq__ is object.__eq__ for child in children.values())


def _structure(modules: list[torch.nn.Module]) -> list[tuple[Edge, Any]]:
    """The places of modules' children, and of what could be a parameter or buffer and is None."""
    return [
        (Edge("dict", container, key), child)
        for module in modules
        for container in (module._modules, module._parameters, module._buffers)
        for key, child in container.items()
        if child is None or container is module._modules
    ]


class _Conditions:
    """Straight-line code that tells whether all of many conditions hold."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], bool]] = []
        self._clear()

    def _clear(self) -> None:
        self._terms: list[str] = []
        self._names: dict[int, str] = {}
        self._bound: dict[str, Any] = {"get": dict.get, "attribute": getattr}

    def mode(self, module: torch.nn.Module, is_training: bool) -> None:
        """The module is in this mode. Its dict is read at a fifth of the cost of its attribute."""
        plainly = "training" in module.__dict__ and not has_own_mode(type(module))
        found = f"{self._name(module.__dict__)}['training']" if plainly else f"{self._name(module)}.training"
        self._add(found if is_training else f"not {found}")

    def place(self, edge: Edge, child: Any) -> None:
        """What is there is the very child given."""
        kind, key = edge.kind, edge.key
        container, at = self._name(edge.container), repr(key) if type(key) in (str, int) else self._name(key)
        if kind == "attribute":
            found = f"attribute({container}, {at})"
        elif kind == "item" or type(edge.container) is dict:
            found = f"{container}[{at}]"
        else:
            found = f"get({container}, {at})"
        self._add(f"{found} is {self._name(child)}")

    def function(self) -> Callable[[], bool]:
        self._end()
        functions = self._functions
        if len(functions) == 1:
            return functions[0]
        self._clear()
        self._terms = [f"{self._name(function)}()" for function in functions]
        return self._written()

    def _add(self, term: str) -> None:
        self._terms.append(term)
        if len(self._terms) == AT_ONCE:
            self._end()

    def _name(self, value: Any) -> str:
        found = self._names.get(id(value))
        if found is None:
            found = self._names[id(value)] = f"_{len(self._names)}"
            self._bound[found] = value
        return found

    def _end(self) -> None:
        if self._terms:
            self._functions.append(self._written())
            self._clear()

    def _written(self) -> Callable[[], bool]:
        arguments = ", ".join(f"{name}={name}" for name in self._bound)
        exec(f"def same({arguments}): return {' and '.join(self._terms) or True}", self._bound)
        return self._bound.pop("same")
