"""Work on the client that a recorded call did twice, as each layer of a model does with one mask, is done once, and sent once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch

from .plain import Entry, Node
from .recorder import Put


@dataclasses.dataclass(slots=True)
class MadeAgain:
    """Node ``index`` is what node ``earlier`` is."""

    index: int
    earlier: int

    def run(self, call: Any) -> None:
        call.env[self.index] = call.env[self.earlier]


@dataclasses.dataclass(slots=True)
class SentAgain:
    """The value that was ``id`` when this was recorded is what ``earlier`` is."""

    id: int
    earlier: int

    def run(self, call: Any) -> None:
        call.values[self.id] = call.values[self.earlier]


def once(items: list[Any], variable: set[int]) -> list[Any]:
    """The items of a call, without repetitions.

    Only ops that make a tensor of others, and draw and write nothing, are left out, and only where nobody ever writes to what they make;
    a tensor is sent once if no program writes to it.
    """
    return _Repeats(items, variable).found


class _Repeats:
    def __init__(self, items: list[Any], variable: set[int]) -> None:
        self._variable = variable
        entries = [item for item in items if type(item) is Entry]
        self._written = {storage for entry in entries for storage in entry.written}
        #: How often each memory has been written so far.
        self._writes: Counter[int] = Counter()
        self._same: dict[int, Node] = {}
        self._made: dict[Any, Node] = {}
        self._sent: dict[Any, Put] = {}
        self.found = [self._entry(item) if type(item) is Entry else self._put(item) for item in items]

    def _entry(self, entry: Entry) -> Any:
        made = entry.result
        pure = isinstance(entry.func, torch._ops.OpOverload) and not entry.func._schema.is_mutable
        pure = pure and not entry.generators and not entry.written
        if pure and type(made) is Node and made.entry is entry and made.storage not in self._written:
            key = entry.func, repr(self._named(entry.args)), repr(self._named(entry.kwargs))
            earlier = self._made.setdefault(key, made)
            if earlier is not made:
                self._same[made.index] = earlier
                return MadeAgain(made.index, earlier.index)
        self._writes.update(entry.written)
        return entry

    def _put(self, item: Any) -> Any:
        if type(item) is Put and not item.value.root.generation:
            earlier = self._sent.setdefault((self._name(item.node), item.spec), item)
            if earlier is not item:
                return SentAgain(item.id, earlier.id)
        return item

    def _name(self, node: Node) -> Any:
        """What a node is at this point; the same for nodes that are alike."""
        node = self._same.get(node.index, node)
        if node.window is not None:
            return self._name(node.window[0]), node.window[1:]
        if node.tensor.ndim == 0 and node.entry is None and node.read is None and node.storage not in self._variable:
            return str(node.tensor.dtype), repr(node.tensor.item())
        return node.index, self._writes[node.storage]

    def _named(self, value: Any) -> Any:
        if type(value) is Node:
            return "node", self._name(value)
        if isinstance(value, (list, tuple)):
            return [self._named(item) for item in value]
        if isinstance(value, dict):
            return [(name, self._named(item)) for name, item in value.items()]
        return type(value), value
