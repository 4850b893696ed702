"""The passes that captured programs go through, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..client import runtime
from ..program.buckets import bucket
from ..program.dead import drop_dead
from ..program.fuse import fuse
from ..program.overlap import overlap
from ..program.reuse import reuse
from ..program.rewrite import Pass
from ..program.scatter import scatter

PASSES: dict[str, Pass] = {
    "dead": drop_dead,
    "reuse": reuse,
    "scatter": lambda program: scatter(program, runtime.controller().meshes.__getitem__),
    "buckets": bucket,
    "overlap": lambda program: overlap(program, runtime.controller().meshes.__getitem__),
}

_off: set[str] = set()


#: What programs go through at the end, for what the workers run them with.
BACKENDS: dict[str | None, list[Pass]] = {None: [], "inductor": [fuse]}


def chosen(backend: str | None) -> list[Pass]:
    """The passes for what is recorded now: all, but for those in `without`, and those of ``backend``."""
    return [one for name, one in PASSES.items() if name not in _off] + BACKENDS[backend]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """What is recorded meanwhile, in any thread, does not go through these passes: to measure one, or to see whether it is to blame.

    Raises:
        ValueError: there is no pass of such a name.
    """
    unknown = set(names) - set(PASSES)
    if unknown:
        raise ValueError(f"there is no pass {', '.join(sorted(unknown))}; there are {', '.join(PASSES)}")
    before = set(_off)
    _off.update(names)
    try:
        yield
    finally:
        _off.clear()
        _off.update(before)
