"""What a handle refers to: a value on the workers, and what else shares its memory.

Views alias (law 6 of the architecture). A view that each device can take of its own part is a view there, and needs nothing here.
A view that had to be taken of a redistributed copy is followed by a `Copy`: it is written back to its parent after every write
through it, and taken anew before it is read if anything else was written. Views of such a view are views of the copy's memory, so
refreshing the copy in place refreshes them all.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple

from ..interrupts import critical

#: Ids of values whose last handle died. Appended by finalizers in any thread; the controller drains it.
FREED: deque[int] = deque()

#: Counts up over all clusters of this process, so that a value of an ended one is never mistaken for another.
next_value_id = itertools.count(1).__next__


class Root:
    """The memory that a value and its aliases share: ``generation`` counts the instructions that wrote it, ``born`` is its first value, or
    `OLDEST` for a parameter's."""

    __slots__ = ("generation", "born")

    def __init__(self, born: float) -> None:
        self.generation = 0
        self.born = born


OLDEST = -math.inf

_making_roots = threading.Lock()

#: In place of the copies of a value that is itself one.
COPY: dict[Any, Any] = {}


class Value:
    """One tensor on the workers, named ``id``. Dies with its last handle, which queues a free.

    ``copy`` is set if its memory is that of a `Copy`; ``keep`` then holds the value whose memory it views. ``kept`` has its kept copies
    (see `dtorch.client.kept`): by spec, each with the generation it was made at; ``taken`` tells how it was taken of its base, if it has
    all elements of that; ``keep`` may hold the base for its copies.
    """

    __slots__ = ("id", "_root", "copy", "keep", "kept", "taken", "__weakref__")

    @critical
    def __init__(self, id: int, root: Root | None = None, copy: Copy | None = None, keep: Value | None = None) -> None:
        self.id = id
        self._root = root
        self.copy = copy
        self.keep = keep
        self.kept: dict[Any, tuple[Value, int]] | None = None
        self.taken: Taken | None = None

    @property
    def root(self) -> Root:
        """Most values are never viewed, written or kept: theirs is made when it is asked for."""
        found = self._root
        if found is None:
            with _making_roots:
                found = self._root
                if found is None:
                    found = self._root = Root(self.id)
        return found

    @critical  # an interrupted finalizer would leave its value on the workers, and the Ctrl-C would be lost
    def __del__(self, freed: Any = FREED.append) -> None:
        freed(self.id)


_new = Value.__new__


@critical
def new_value() -> Value:
    """A value of an id of its own, whose memory is its own: ``Value(next_value_id())`` at a third of the cost."""
    value = _new(Value)
    value.id = next_value_id()
    value._root = value.copy = value.keep = value.kept = value.taken = None
    return value


class Taken(NamedTuple):
    """How a view was taken: it is ``info.op(base, *args, **kwargs)``, of a base with ``spec``."""

    base: weakref.ref[Value]
    spec: Any
    info: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Copy:
    """The memory of a view that was taken of a redistributed copy of its parent.

    ``id`` and ``spec`` are the view itself: output ``output`` of ``info.op(parent, *args, **kwargs)``. ``generation`` is the root's
    when view and parent last agreed.
    """

    __slots__ = ("id", "spec", "parent", "parent_spec", "info", "args", "kwargs", "output", "generation")

    def __init__(
        self, id: int, spec: Any, parent: Value, parent_spec: Any, info: Any, args: Any, kwargs: Any, output: int
    ) -> None:
        self.id = id
        self.spec = spec
        self.parent = parent
        self.parent_spec = parent_spec
        self.info = info
        self.args = args
        self.kwargs = kwargs
        self.output = output
        self.generation = parent.root.generation
