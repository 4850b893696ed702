"""What a captured call returns: the recorded result, made anew around the tensors of each call."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

Maker = Callable[[Any], Any]
"""``make(call)``: the part of the result in that call."""


def maker_of(result: Any, of_tensor: Callable[[torch.Tensor], Maker], existed: Callable[[Any], bool]) -> Maker:
    """How to make ``result`` in another call.

    Args:
        of_tensor: the same for a tensor.
        existed: whether an object was there before the function made any; it stays itself.
    """
    seen: dict[int, Any] = {}

    def visit(value: Any) -> tuple[Maker, bool]:
        """The maker, and whether there is a tensor in the value."""
        if isinstance(value, torch.Tensor):
            return of_tensor(value), True
        if isinstance(value, (str, bytes, int, float, complex, bool, type(None), type)) or id(value) in seen:
            return (lambda call: value), False
        if existed(value):
            return (lambda call: value), False
        seen[id(value)] = value
        kind = type(value)
        if isinstance(value, (list, tuple)):
            items = [visit(item) for item in value]
            makers = [make for make, _ in items]
            has = any(found for _, found in items)
            if kind in (list, tuple):
                return (lambda call: kind([make(call) for make in makers])), has
            if hasattr(kind, "_make"):
                return (lambda call: kind._make([make(call) for make in makers])), has
            if not has:
                return (lambda call: value), False
            return (lambda call: kind([make(call) for make in makers])), has
        own = getattr(value, "__dict__", None)
        attributes = {name: visit(item) for name, item in own.items()} if type(own) is dict else {}
        entries = {key: visit(item) for key, item in dict.items(value)} if isinstance(value, dict) else {}
        has = any(found for _, found in (*attributes.values(), *entries.values()))
        if kind is dict:
            plain = {key: make for key, (make, _) in entries.items()}
            return (lambda call: {key: make(call) for key, make in plain.items()}), has
        if not has:
            return (lambda call: value), False
        put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__

        def rebuild(call: Any) -> Any:
            made = kind.__new__(kind)
            for key, (make, _) in entries.items():
                put(made, key, make(call))
            for name, (make, _) in attributes.items():
                made.__dict__[name] = make(call)
            return made

        return rebuild, True

    return visit(result)[0]
