"""Moves that an op needs and nobody asked for: who minds is told before anything runs (`dtorch.observe.implicit`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..sharding.spec import Spec
from ..sharding.strategy import Call
from . import watch

#: What `dtorch.set_implicit_communication` has set.
mode = "allow"
#: Called with what is told, first by `dtorch.observe.implicit`, which minds by the mode.
before_moves: list[Any] = []


class Told(NamedTuple):
    """An op is about to move tensors of some specs, or to complete a reduction: ``call`` as its rule sees it, if it has one."""

    name: str
    specs: list[Spec]
    moves: Sequence[tuple[Spec, Spec]]
    gathered: bool
    call: Call | None


def is_heard(gathered: bool) -> bool:
    """Whether anybody would mind what `tell` has to say: nearly always nobody does."""
    return gathered or mode != "allow" or len(before_moves) > 1 or bool(watch.recorders)


def tell(name: str, specs: list[Spec], moves: Sequence[tuple[Spec, Spec]], gathered: bool, call: Call | None) -> None:
    """Tell it; whoever is told may raise. A recorder keeps it, for what it records will do the same again."""
    told = Told(name, specs, moves, gathered, call)
    for look in before_moves:
        look(*told)
    recorder = watch.recorder()
    if recorder is not None:
        recorder.told.append(told)
