"""What a recorded call has changed outside of the function, that a later call must change likewise."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ..client import rebinding
from ..tensor import Tensor
from .guards import NOTHING
from .outer import Outer
from .outside import Edge, Outside, contents_of
from .recorder import Recorder

Change = tuple[Edge, Any, "int | None"]
"""A place, what was there, and the number of the handle that is there now; None if there is none."""


def put(before: Outside, after: Outside, number: Callable[[Any], int], recorder: Recorder) -> list[Change]:
    """Where other tensors are than before. ``number``: of a handle that every call makes."""
    existing = _containers(before)
    found: list[Change] = []
    for place, (edge, child) in after.edges.items():
        was = before.edges.get(place, (None, NOTHING))[1]
        if child is was or not isinstance(child, torch.Tensor):
            continue
        if type(child) is not Tensor or child._spec is None:
            recorder.once("it puts a plain tensor somewhere outside")
        elif id(edge.container) not in existing or (edge.kind == "item" and was is NOTHING):
            recorder.once("it puts tensors into objects that it makes, or appends them to lists")
        else:
            found.append((edge, was, number(child)))
    return found


def taken_away(before: Outside, after: Outside, recorder: Recorder) -> list[Change]:
    """Where there are no tensors any more."""
    found: list[Change] = []
    for place, (edge, was) in before.edges.items():
        if isinstance(was, Tensor) and place not in after.edges:
            if edge.kind == "grad" or (edge.kind == "dict" and edge.key in edge.container):
                found.append((edge, was, None))
            elif edge.get() is not was:
                recorder.once("it takes tensors out of objects outside")
    return found


def rebound(outer: Outer, number: Callable[[Any], int]) -> list[tuple[int, int]]:
    """Handles from outside, by index, that refer to something else than before; each with the number of a handle on what."""
    return [
        (index, number(rebinding.data_of(handle)))
        for index, (handle, value) in enumerate(zip(outer.handles, outer.values, strict=True))
        if handle._value is not value
    ]


class Given:
    """The lists and dicts that a call is given: what they held before."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._roots = [list(args), kwargs]
        self._before = Outside(self._roots)
        self._contents = self._before.contents()

    def refuse_changes(self, before: Outside, after: Outside, recorder: Recorder) -> None:
        """Refuse what later calls would not do to theirs. What can be reached from the function itself is no matter of this."""
        for place, (edge, child) in Outside(self._roots).edges.items():
            known = self._before.edges.get(place, (edge, child))[1]
            if isinstance(child, Tensor) and child is not known and place not in after.edges and edge.kind != "grad":
                recorder.refuse("it puts tensors into a list or dict that it is given")
        for container, items in self._contents:
            now = contents_of(container)
            if not before.saw(container) and (len(now) != len(items) or any(map(operator.is_not, now, items))):
                recorder.refuse("it changes a list or dict that it is given")


def _containers(before: Outside) -> set[int]:
    """What a later call will find there, by identity."""
    found = {id(edge.container) for edge, _ in before.edges.values()}
    for one in before.every():
        found.add(id(one))
        own = getattr(one, "__dict__", None) if not isinstance(one, type) else None
        if type(own) is dict:
            found.add(id(own))
        if isinstance(one, torch.nn.Module):
            found |= {id(own[name]) for name in ("_parameters", "_buffers", "_modules")}
    return found
