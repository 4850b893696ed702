"""What differs between the last calls of a compiled function that has been recorded too often, for people."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..sharding.spec import Spec
from .arguments import CONTAINERS, VALUES
from .captured import Captured
from .reads import same


def reads(latest: list[Captured]) -> str:
    """Where a value was read that was another in the last recordings, of calls which are alike otherwise; empty if nowhere."""
    if len(latest) > 1:
        for one, other in zip(latest[0].reads, latest[1].reads, strict=False):
            if not same(one.found, other.found):
                return f"a value that is read, at {one.line}"
    return ""


def outside(captured: Captured) -> str:
    """What is not outside as it was recorded; empty if it cannot be told."""
    guards = captured.guards
    for edge, child in zip(guards.edges[guards.moving :], guards.fixed, strict=True):
        if edge.get() is not child and not isinstance(child, torch.Tensor):
            return f"{edge}, which is another {type(child).__name__}"
    places = [*captured.moving, *[guards.moving + at for at in captured.fixed]]
    for at, spec in zip(places, captured.specs[len(captured.leaves) :], strict=True):
        found = getattr(guards.edges[at].get(), "_spec", None)
        if found is not None and found is not spec:
            return f"{guards.edges[at]}, a tensor outside of it ({_kind(spec)}, {_kind(found)})"
    return ""


def arguments(function: Callable[..., Any], keys: list[tuple[Any, ...]]) -> str:
    """Which argument differs between calls of ``function`` with these keys, for people; empty if none."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        names = []
    given: dict[str, list[Any]] = {}
    for key in keys:
        for index, value in enumerate(key[0]):
            given.setdefault(names[index] if index < len(names) else str(index), []).append(value)
        for name, value in key[1]:
            given.setdefault(name, []).append(value)
    found = [
        f"argument {_difference(name, values)}" if len(values) == len(keys) else f"argument {name!r} (given, or not)"
        for name, values in given.items()
        if len(set(values)) > 1 or len(values) < len(keys)
    ]
    if not found and len({key[2] for key in keys}) > 1:
        found.append(
            "the modes of torch (grad, inference, autocast, default dtype) or of dtorch (no_sync, implicit communication)"
        )
    return " and ".join(found)


def _difference(name: str, parts: list[Any]) -> str:
    """An argument's parts of several keys, or, of containers that are alike, the first items that differ."""
    kinds = {(part[0], len(part[1])) if _is_container(part) else None for part in parts}
    if len(kinds) == 1 and None not in kinds:
        for index, items in enumerate(zip(*[part[1] for part in parts], strict=True)):
            if len(set(items)) == 1:
                continue
            if parts[0][0] in (list, tuple):
                return _difference(f"{name}[{index}]", list(items))
            if len({item[:2] for item in items}) == 1:
                return _difference(f"{name}[{items[0][1]!r}]", [item[2] for item in items])
            return f"{name!r} (a key {items[0][1]!r}, {items[1][1]!r})"
    return f"{name!r} ({', '.join(map(_shown, dict.fromkeys(parts)))})"


def _is_container(part: Any) -> bool:
    return isinstance(part, tuple) and len(part) == 2 and part[0] in CONTAINERS


def _shown(part: Any) -> str:
    """One argument's part of a key."""
    if not isinstance(part, tuple) or not part:
        return str(part)
    first = part[0]
    if isinstance(first, Spec):
        return _kind(first)
    if _is_container(part):
        return f"{first.__name__} of {len(part[1])}"
    if isinstance(first, type) and len(part) == 2:
        if first is float:
            return str(float.fromhex(part[1]))
        return str(part[1]) if first in VALUES else first.__name__
    return f"{getattr(first, '__name__', first)} {tuple(part[1]) if isinstance(part[1], torch.Size) else part[1]}"


def _kind(spec: Spec) -> str:
    """A tensor's spec, for people."""
    return f"{tuple(spec.shape)} {spec.dtype} {spec.placements}"
