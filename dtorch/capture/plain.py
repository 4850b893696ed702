"""The work on plain and uncommitted tensors that a captured function does on the client, so that a later call does it again.

All of it is noted while recording. What depends on constants alone is done with: its results are constants of the program. What
depends on an argument, on a tensor outside of the function or on random numbers is run again at every call, in the order it was run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Bytes of a tensor whose contents at its first use may be kept, where nobody saw how it was made.
SNAPSHOT = 16 << 20
UNSEEN = "a plain tensor comes from where dtorch.compile cannot see (numpy memory, a C extension)"

#: Types of plain tensors.
PLAIN = (torch.Tensor, torch.nn.Parameter)


class Mismatch(Exception):
    """A call is not like the recorded one after all. ``found``: what it has read until then."""

    def __init__(self, found: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.found = found


@dataclasses.dataclass(slots=True)
class Node:
    """A plain tensor of the recording: what it is in another call.

    ``read`` gives it from outside (an argument, a place); else it is output ``out`` of ``entry``; else a copy of ``start``; else unknown.
    ``window``: it is a view with this size, stride and offset of another node.
    """

    index: int
    tensor: torch.Tensor
    storage: int
    read: Callable[[Any], torch.Tensor] | None = None
    entry: Entry | None = None
    start: torch.Tensor | None = None
    window: tuple[Node, tuple[int, ...], tuple[int, ...], int] | None = None


@dataclasses.dataclass(slots=True)
class Entry:
    """One call of a function of plain tensors, with nodes in place of tensors; ``result`` is what it gave, likewise."""

    func: Any
    args: Any
    kwargs: dict[str, Any]
    inputs: list[Node]
    written: set[int]
    #: Those that it draws from.
    generators: list[torch.Generator]
    result: Any = None
    outs: list[Node] = dataclasses.field(default_factory=list)
    line: str = ""

    def run(self, env: dict[int, torch.Tensor]) -> None:
        """Do it again, and see that it gives what a program can rely on: the same shapes, the same Python values."""
        result = self.func(*_filled(self.args, env), **_filled(self.kwargs, env))
        _compare(self.result, result, env)


def _filled(value: Any, env: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, Node):
        return window(value, env)
    if isinstance(value, (list, tuple)):
        return type(value)([_filled(item, env) for item in value])
    if isinstance(value, dict):
        return {name: _filled(item, env) for name, item in value.items()}
    return value


def _compare(expected: Any, found: Any, env: dict[int, torch.Tensor]) -> None:
    if isinstance(expected, Node):
        like = expected.tensor
        if found.shape != like.shape or found.dtype != like.dtype or found.stride() != like.stride():
            raise Mismatch
        env[expected.index] = found
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            raise Mismatch
        for one, other in zip(expected, found, strict=True):
            _compare(one, other, env)
    elif expected is not found and expected != found:
        raise Mismatch


class Tape:
    """What one recording did with plain tensors, in order."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        self.entries: list[Entry] = []
        self.variable: set[int] = set()
        self._refuse = refuse
        self._nodes: dict[int, Node] = {}
        self._by_storage: dict[int, Node] = {}
        #: Storages that Python read past torch's dispatcher, each with who did.
        self._read: list[tuple[int, str]] = []
        self._later_writes: dict[int, int] = {}

    # -- while recording

    def outside(self, tensor: torch.Tensor, read: Callable[[Any], torch.Tensor]) -> None:
        """Tell of a tensor that another call finds by ``read``."""
        if id(tensor) not in self._nodes:
            self._add(tensor).read = read

    def fresh(self, plain: torch.Tensor) -> None:
        """Tell of an uncommitted tensor that a factory of torch's has just made."""
        self._add(plain)

    def looked_at(self, tensor: torch.Tensor, how: str) -> None:
        """Python reads the values of ``tensor``, and may decide by them."""
        self._read.append((_storage(tensor), how))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], where: str) -> Any:
        """Call a function of plain tensors and note it."""
        inputs: list[Node] = []
        entry = Entry(func, self._named(args, inputs), self._named(kwargs, inputs), inputs, set(), [], line=where)
        versions = [_version(node.tensor) for node in inputs]
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        entry.generators = _generators(args, kwargs, draws=not torch.equal(state, torch.get_rng_state()))
        entry.written = {
            node.storage for node, version in zip(inputs, versions, strict=True) if _version(node.tensor) != version
        }
        if isinstance(func, torch._ops.OpOverload):  # below autograd, where versions stay
            entry.written |= _written_by(func, entry.args, entry.kwargs)
        entry.result = self._made(result, entry)
        self.entries.append(entry)
        for storage in entry.written:
            self._later_writes[storage] = len(self.entries) - 1
        return result

    def made(self, func: Any, args: Any, kwargs: dict[str, Any], result: torch.Tensor, draws: bool) -> None:
        """Note a call that took no tensor and made one; ``draws``: by torch's default generator."""
        entry = Entry(func, args, kwargs, [], set(), _generators(args, kwargs, draws))
        entry.result = self._made(result, entry)
        self.entries.append(entry)

    def node(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor that something of the recording needs, seen before or not."""
        found = self._nodes.get(id(tensor))
        if found is not None:
            if found.entry is None and found.read is None and found.start is None and found.window is None:
                self._snapshot(found)
            return found
        base = self._by_storage.get(_storage(tensor))
        if base is None and tensor.ndim:  # composites of torch's make 0-d tensors of their numbers
            self._refuse(UNSEEN)
        node = self._add(tensor)
        if base is not None and base.tensor.dtype == tensor.dtype:
            node.window = base, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        return node

    def is_known(self, tensor: torch.Tensor) -> bool:
        """Whether the recording has seen the memory of ``tensor``."""
        return _storage(tensor) in self._by_storage

    def _add(self, tensor: torch.Tensor) -> Node:
        node = Node(len(self._nodes), tensor, _storage(tensor))
        self._nodes[id(tensor)] = node
        self._by_storage.setdefault(node.storage, node)
        return node

    def _snapshot(self, node: Node) -> None:
        if node.start is None and node.tensor.nbytes <= SNAPSHOT:
            node.start = node.tensor.detach().clone()

    def _named(self, value: Any, inputs: list[Node]) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(self.node(value))
            return inputs[-1]
        if isinstance(value, (list, tuple)):
            return type(value)([self._named(item, inputs) for item in value])
        if isinstance(value, dict):
            return {name: self._named(item, inputs) for name, item in value.items()}
        return value

    def _made(self, value: Any, entry: Entry) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._nodes.get(id(value))
            if known is None:
                known = self._add(value)
                known.entry = entry
                entry.outs.append(known)
            return known
        if isinstance(value, (list, tuple)):
            return [self._made(item, entry) for item in value]
        return value

    # -- afterwards

    def settle(self) -> None:
        """Find the memory whose contents differ from call to call."""
        variable = {node.storage for node in self._nodes.values() if node.read is not None}
        before = -1
        while len(variable) != before:
            before = len(variable)
            for index, entry in enumerate(self.entries):
                touched = {node.storage for node in entry.outs} | entry.written
                read = {node.storage for node in entry.inputs}
                if entry.generators or read & variable or touched & variable:
                    variable |= touched
                    # What is constant but is written later does not have now what it will have then.
                    variable |= {s for s in read if self._later_writes.get(s, -1) > index}
        self.variable = variable
        for storage, how in self._read:
            if storage in variable:
                self._refuse(how)
        random: set[int] = set()
        for entry in self.entries:
            reads_random = any(node.storage in random for node in entry.inputs)
            if entry.generators or reads_random:
                random |= {node.storage for node in entry.outs} | entry.written
            plain_result = not entry.outs and not entry.written
            if reads_random and plain_result:
                self._refuse(f"a random number decides at {entry.line}")

    def again(self) -> list[Entry]:
        """The ops that every call runs."""
        return [entry for entry in self.entries if self.varies(entry)]

    def varies(self, entry: Entry) -> bool:
        touched = {node.storage for node in (*entry.outs, *entry.inputs)} | entry.written
        return bool(entry.generators or touched & self.variable)

    def starts(self, needed: Iterable[Node]) -> list[Node]:
        """The nodes that no op of `again` makes, of those that ``needed`` come from: in the order to be given to a call."""
        found: dict[int, Node] = {}

        def visit(node: Node) -> None:
            if node.index in found or (node.entry is not None and self.varies(node.entry)):
                return
            if node.window is not None:
                visit(node.window[0])
            elif node.storage in self.variable and node.read is None and node.start is None:
                self._refuse(UNSEEN)
            found[node.index] = node

        for entry in self.again():
            for node in entry.inputs:
                visit(node)
        for node in needed:
            visit(node)
        return list(found.values())


def given(nodes: list[Node], call: Any, variable: set[int]) -> dict[int, torch.Tensor]:
    """What the nodes are in a call."""
    env: dict[int, torch.Tensor] = {}
    for node in nodes:
        if node.window is None:
            if node.read is not None:
                found = node.read(call)
                like = node.tensor
                if type(found) not in PLAIN or found.shape != like.shape or found.dtype != like.dtype:
                    raise Mismatch
                if found.stride() != like.stride():
                    raise Mismatch
                env[node.index] = found
            elif node.storage in variable and node.start is not None:
                env[node.index] = node.start.clone()
            else:
                env[node.index] = node.tensor
    return env


def window(node: Node, env: dict[int, torch.Tensor]) -> torch.Tensor:
    """The tensor of a node in a call, all ops having run."""
    found = env.get(node.index)
    if found is None:
        base, size, stride, offset = node.window  # type: ignore[misc]
        found = torch.as_strided(window(base, env), size, stride, offset)
    return found


def _written_by(op: torch._ops.OpOverload, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """The memory that an op writes, of arguments with nodes in place of tensors."""
    found: set[int] = set()
    for at, argument in enumerate(op._schema.arguments if op._schema.is_mutable else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            found |= {node.storage for node in (value if isinstance(value, list) else [value]) if type(node) is Node}
    return found


def _generators(args: Any, kwargs: dict[str, Any], draws: bool) -> list[torch.Generator]:
    """Those that a call draws from; ``draws``: the default one too."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
    return [torch.default_generator, *given] if draws else given


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
