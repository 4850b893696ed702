"""What a captured call returns: the recorded result, made anew around the tensors of each call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

Maker = Callable[[Any], Any]
"""``make(call)``: the part of the result in that call."""

Make = Callable[[Any, dict[int, Any]], Any]
"""``make(call, made)``: the same, with what has been made in that call, by the recorded object's id: one object stays one object."""


def maker_of(
    result: Any,
    of_tensor: Callable[[torch.Tensor], Maker],
    existed: Callable[[Any], bool],
    refuse: Callable[[str], None],
) -> Maker:
    """How to make ``result`` in another call.

    Args:
        of_tensor: the same for a tensor.
        existed: whether an object was there before the function made any; it stays itself.
        refuse: told why it cannot be made.
    """
    visited: dict[int, tuple[Make, bool] | None] = {}
    alive: list[Any] = []  # else another object could get the id of one

    def visit(value: Any) -> tuple[Make, bool]:
        """How to make the value, and whether there is a tensor in it."""
        if isinstance(value, torch.Tensor):
            of_call = of_tensor(value)
            return (lambda call, made: of_call(call)), True
        if isinstance(value, (str, bytes, int, float, complex, bool, type(None), type)) or existed(value):
            return (lambda call, made: value), False
        number = id(value)
        if number in visited:
            known = visited[number]
            if known is None:
                refuse(f"it returns a {type(value).__name__} that holds itself")
                return (lambda call, made: value), False
            return known
        visited[number] = None
        alive.append(value)
        build, has = parts(value)

        def once(call: Any, made: dict[int, Any]) -> Any:
            if number not in made:
                made[number] = build(call, made)
            return made[number]

        found = visited[number] = (once, has)
        return found

    def parts(value: Any) -> tuple[Make, bool]:
        kind = type(value)
        if isinstance(value, (list, tuple)):
            items = [visit(item) for item in value]
            makes = [make for make, _ in items]
            has = any(found for _, found in items)
            if hasattr(kind, "_make"):
                return (lambda call, made: kind._make([make(call, made) for make in makes])), has
            if kind not in (list, tuple) and not has:
                return (lambda call, made: value), False
            return (lambda call, made: kind([make(call, made) for make in makes])), has
        own = getattr(value, "__dict__", None)
        attributes = {name: visit(item) for name, item in own.items()} if type(own) is dict else {}
        entries = {key: visit(item) for key, item in dict.items(value)} if isinstance(value, dict) else {}
        has = any(found for _, found in (*attributes.values(), *entries.values()))
        if kind is dict:
            return (lambda call, made: {key: make(call, made) for key, (make, _) in entries.items()}), has
        if not has:
            return (lambda call, made: value), False
        put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__

        def rebuild(call: Any, made: dict[int, Any]) -> Any:
            other = kind.__new__(kind)
            for key, (make, _) in entries.items():
                put(other, key, make(call, made))
            for name, (make, _) in attributes.items():
                other.__dict__[name] = make(call, made)
            return other

        return rebuild, True

    make = visit(result)[0]
    return lambda call: make(call, {})
