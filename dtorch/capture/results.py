"""What a captured call returns: the recorded result, made anew around the tensors of each call, by straight-line code written for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

Maker = Callable[..., Any]
"""``make(handles, tensors, returned, plain)``: the result of a call, from its outputs, its arguments' tensors, the tensors from outside
that it returns as they are, and a function that gives its plain tensors."""

Bind = Callable[[Any], str]
"""Gives an object a name in the code."""


def maker_of(
    result: Any,
    of_tensor: Callable[[torch.Tensor, Bind], str],
    existed: Callable[[Any], bool],
    refuse: Callable[[str], None],
) -> Maker:
    """How to make ``result`` in another call.

    Args:
        of_tensor: the expression that is a tensor in `Maker`'s terms.
        existed: whether an object was there before the function made any; it stays itself.
        refuse: told why it cannot be made.
    """
    writer = _Writer(of_tensor, existed, refuse)
    expression = writer.visit(result)[0]
    source = ["def make(handles, tensors, returned, plain):", *writer.lines, f"    return {expression}"]
    exec("\n".join(source), writer.bound)
    return writer.bound["make"]


class _Writer:
    def __init__(self, of_tensor: Any, existed: Any, refuse: Any) -> None:
        self.of_tensor = of_tensor
        self.existed = existed
        self.refuse = refuse
        self.bound: dict[str, Any] = {}
        self.lines: list[str] = []
        #: By a recorded object's id, its expression, and whether there is a tensor in it: one object stays one object. None: half done.
        self.visited: dict[int, tuple[str, bool] | None] = {}
        self._alive: list[Any] = []  # else another object could get the id of one

    def bind(self, value: Any) -> str:
        name = f"k{len(self.bound)}"
        self.bound[name] = value
        return name

    def made(self, expression: str) -> str:
        """The name of what ``expression`` gives."""
        name = f"x{len(self.lines)}"
        self.lines.append(f"    {name} = {expression}")
        return name

    def visit(self, value: Any) -> tuple[str, bool]:
        """The expression that is the value, and whether there is a tensor in it."""
        if value is None or value is True or value is False:
            return repr(value), False
        if isinstance(value, (str, bytes, int, float, complex, type)) or (
            not isinstance(value, torch.Tensor) and self.existed(value)
        ):
            return self.bind(value), False
        number = id(value)
        if number in self.visited:
            known = self.visited[number]
            if known is None:
                self.refuse(f"it returns a {type(value).__name__} that holds itself")
                return self.bind(value), False
            return known
        self.visited[number] = None
        self._alive.append(value)
        found = self.visited[number] = self.parts(value)
        return found

    def parts(self, value: Any) -> tuple[str, bool]:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self.made(self.of_tensor(value, self.bind)), True
        if isinstance(value, (list, tuple)):
            return self.sequence(value, kind)
        own = getattr(value, "__dict__", None)
        attributes = {name: self.visit(item) for name, item in own.items()} if type(own) is dict else {}
        entries = {key: self.visit(item) for key, item in dict.items(value)} if isinstance(value, dict) else {}
        has = any(found for _, found in (*attributes.values(), *entries.values()))
        if kind is dict:
            return self.made(self.dictionary(entries)), has
        if not has:
            return self.bind(value), False
        name = self.made(f"{self.bind(kind)}.__new__({self.bind(kind)})")
        put = self.bind(OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__)
        self.lines += [f"    {put}({name}, {self.bind(key)}, {entry})" for key, (entry, _) in entries.items()]
        if attributes:
            self.lines.append(f"    {name}.__dict__.update({self.dictionary(attributes)})")
        return name, True

    def sequence(self, value: Any, kind: type) -> tuple[str, bool]:
        items = [self.visit(item) for item in value]
        has = any(found for _, found in items)
        listed = f"[{', '.join(expression for expression, _ in items)}]"
        if kind is list:
            return self.made(listed), has
        if hasattr(kind, "_make"):
            return self.made(f"{self.bind(kind)}._make({listed})"), has
        if kind is not tuple and not has:
            return self.bind(value), False
        return self.made(f"{self.bind(kind)}({listed})"), has

    def dictionary(self, entries: dict[Any, tuple[str, bool]]) -> str:
        return "{" + ", ".join(f"{self.bind(key)}: {entry}" for key, (entry, _) in entries.items()) + "}"
