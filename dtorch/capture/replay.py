"""Plain ops of a captured call, run again by straight-line code written once, where nothing can come out differently.

An op whose result has a shape, strides and dtype that follow from those of its arguments needs no comparing: what a call starts from has
been compared. Numbers and lists among its arguments are bound when the code is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..client.torch_internals import direct
from . import plain
from .plain import Entry, Node
from .repeats import MadeAgain


class Replay:
    """Items of a call in a row: ``run`` does what theirs did."""

    __slots__ = ("_function",)

    def __init__(self, items: list[Any]) -> None:
        self._function = _written(items)

    def run(self, call: Any) -> None:
        self._function(call.env)


def joined(items: list[Any]) -> list[Any]:
    """The items, with a `Replay` in place of each row of those that one can run."""
    found: list[Any] = []
    for sure, group in itertools.groupby(items, _is_sure):
        row = list(group)
        found += [Replay(row)] if sure else row
    return found


def _is_sure(item: Any) -> bool:
    """Whether an item is an op on plain tensors that gives a tensor of the recorded kind whatever the numbers in its arguments are."""
    if type(item) is MadeAgain:
        return True
    return (
        type(item) is Entry
        and type(item.func) is torch._ops.OpOverload
        and (torch.Tag.pointwise in item.func.tags or item.func.is_view)
        and type(item.result) is Node
        and not item.generators
    )


def _written(items: list[Any]) -> Callable[[dict[int, torch.Tensor]], None]:
    bound: dict[str, Any] = {"window": plain.window}
    made: set[int] = set()
    lines = ["def run(env):"]

    def bind(value: Any) -> str:
        name = f"k{len(bound)}"
        bound[name] = value
        return name

    def node(index: int) -> str:
        return f"n{index}" if index in made else f"env[{index}]"

    def argument(value: Any) -> str:
        if type(value) is Node:
            if value.window is None or value.index in made:
                return node(value.index)
            return f"window({bind(value)}, env)"
        if isinstance(value, (list, tuple)) and any(type(item) is Node for item in value):
            return f"[{_listed(map(argument, value))}]"
        return bind(value)

    for item in items:
        if type(item) is MadeAgain:
            out, source = item.index, node(item.earlier)
        else:
            out = item.result.index
            named = [f"{name}={argument(value)}" for name, value in item.kwargs.items()]
            source = f"{bind(direct(item.func))}({_listed([*map(argument, item.args), *named])})"
        made.add(out)
        lines.append(f"    n{out} = env[{out}] = {source}")
    exec("\n".join(lines), bound)
    return bound["run"]


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(parts)
