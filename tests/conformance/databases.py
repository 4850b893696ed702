"""Everything there is to check, by name."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Callable, Iterator

from . import modules, ops, optimizers
from .adapters import Adapter
from .checks import Grid
from .outcome import Outcome


@dataclasses.dataclass(frozen=True)
class Entry:
    """An op, a module (``nn.…``) or an optimizer (``optim.…``)."""

    name: str
    aliases: tuple[str, ...]
    run: Callable[[Adapter, Grid], Iterator[Outcome]]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """All of them, ops first."""
    found = [Entry(op.formatted_name, (op.name,), functools.partial(ops.run, op)) for op in ops.database()]
    found += [Entry(info.name, (), functools.partial(modules.run, info)) for info in modules.database()]
    found += [
        Entry(optimizers.name(info), (), functools.partial(optimizers.run, info)) for info in optimizers.database()
    ]
    return tuple(found)


def select(patterns: tuple[str, ...] = ("*",), part: int = 0, parts: int = 1) -> list[Entry]:
    """Part ``part`` of ``parts`` of the entries that match one of ``patterns`` (shell style).

    Raises:
        ValueError: a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(_matches(pattern, entry) for entry in entries()):
            raise ValueError(f"no op, module or optimizer is called {pattern!r}")
    return [entry for entry in entries() if any(_matches(pattern, entry) for pattern in patterns)][part::parts]


def _matches(pattern: str, entry: Entry) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (entry.name, *entry.aliases))
