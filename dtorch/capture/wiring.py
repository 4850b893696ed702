"""Where each value of composed programs is in another call: in arguments, at guarded places, in constants, in what is made before."""

from __future__ import annotations

from typing import Any

import torch

from ..client import lines
from ..program.compose import Segment
from ..tensor import Tensor
from .asked import with_mode
from .captured import Captured
from .guards import ANY_TENSOR, Guards
from .outside import Edge
from .parts import Binding, Output
from .recorder import Put


class Wiring:
    """What a `Recording` finds out of it.

    ``read``: the handles from outside that a call reads, by index; ``position``: where each is in a call; ``inner``: the values that the
    programs make, in order; ``pool``: where each value is.
    """

    def __init__(self, recording: Any) -> None:
        self._recording = recording
        self._outer = recording.outer
        self.read: list[int] = []
        self.position: dict[int, int] = {}
        self.inner: list[int] = []
        self.pool: dict[int, int] = {}

    def find(self, captured: Captured, segments: list[Segment], read_later: set[int]) -> None:
        """Find them, and tell ``captured``. ``read_later``: values that backward reads."""
        recorder = self._recording.recorder
        inner = [value for segment in segments for value in segment.outputs]
        self.inner = inner
        known = set(self._outer.index_of_value) | set(recorder.puts)
        later = [v for v in sorted(read_later) if v in known and v not in self._recording.fresh]
        later += [read.id for read in recorder.reads if read.id not in set(inner)]
        used = list(dict.fromkeys([*[v for s in segments for v in s.inputs if v not in set(inner)], *later]))
        written = self._outer.written()
        readers = {value: command for command in reversed(recorder.commands) for value in command.inputs}
        bases = {id(value.root): i for i, value in reversed(list(enumerate(self._outer.values)))}
        wanted = {self._outer.index_of_value[v] for v in used if v in self._outer.index_of_value}
        wanted |= {i for i in written if self._outer.index_of_value[self._outer.values[i].id] == i}
        wanted |= {i for i, _ in self._recording.rebound}
        if any(handle.grad_fn is not None for handle in self._recording.handles):
            read = {value for command in recorder.commands for value in command.inputs}
            wanted |= {
                i for i, v in enumerate(self._outer.values) if v.id in read and self._outer.handles[i].requires_grad
            }
        wanted |= {bases[id(h._value.root)] for h in self._recording.handles if id(h._value.root) in bases}
        own = [self._outer.index_of_value.get(handle._value.id) for handle in self._recording.handles]
        wanted |= {index for index in own if index is not None}
        #: Indices in `outer` of the handles that a call reads: one of each value, then the others on the same value.
        self.read = sorted(wanted)
        values = {self._outer.values[i].id for i in self.read}
        self.read += [i for i, value in enumerate(self._outer.values) if value.id in values and i not in wanted]
        self.position = {index: at for at, index in enumerate(self.read)}
        captured.written = [self.position[i] for i in sorted(written) if i in self.position and i in wanted]
        sources: dict[int, int] = {}
        constants: list[Put] = []
        puts: list[Put] = []
        for value in used:
            put = recorder.puts.get(value)
            if value in self._outer.index_of_value:
                sources[value] = self.position[self._outer.index_of_value[value]]
                if not self._is_ready(self._outer.index_of_value[value], written):
                    recorder.refuse("it has a view that was taken of a redistributed copy: give a clone() of it")
            elif put is None:
                command = readers.get(value)
                at = "" if command is None else f" at {lines.text(command.line)}"
                recorder.refuse(
                    f"it reads a tensor from where dtorch.compile cannot see{at}: give it as an argument, or keep it in the module"
                )
                return
            elif put.node.storage in recorder.tape.variable:
                puts.append(put)
            else:
                constants.append(put)
        count = len(self.read)
        for number, put in enumerate([*constants, *puts]):
            sources[put.id] = count + number
        count += len(constants) + len(puts)
        for number, value in enumerate(inner):
            sources[value] = count + number
        self.pool = {
            **sources,
            **{put: sources[copy] for put, copy in self._recording.fresh.items() if copy in sources},
        }
        captured.sources = [[sources[v] for v in segment.inputs] for segment in segments]
        for read in recorder.reads:
            read.source = sources[read.id]
        captured.constants = [put.spare if put.id in self._recording.fresh else put.value for put in constants]
        if self._recording.keeps_constants:
            captured.sent = [put.node.tensor for put in constants]
        captured.puts = [put.id for put in puts]
        self._recording.needed += [put.node for put in puts]
        self._describe_outputs(captured, inner, bases)

    def _is_ready(self, index: int, written: set[int]) -> bool:
        """Whether what a handle from outside refers to will be what a program is to read: if it is a view that was taken of a redistributed
        copy, an argument that is only read, which a call brings up to date before (`Captured.refresh`)."""
        value, handle = self._outer.values[index], self._outer.handles[index]
        given = any(handle is tensor for tensor in self._recording.arguments.tensors)
        return value.copy is None or (given and index not in written)

    def _describe_outputs(self, captured: Captured, inner: list[int], bases: dict[int, int]) -> None:
        roots: dict[int, Any] = {}
        owners: dict[int, Any] = {self._recording.id_of(handle): handle._value for handle in self._recording.handles}
        for value in inner:
            owner = owners.get(value)
            if owner is None:
                captured.made.append((None, None))
            elif id(owner.root) in bases:
                captured.made.append((self.position[bases[id(owner.root)]], None))
            else:
                captured.made.append((None, id(owner.root)))
        place = {value: i for i, value in enumerate(inner)}
        differentiable: set[int] = set()
        for handle in self._recording.handles:
            if handle.grad_fn is not None:
                if id(handle._value.root) in bases or id(handle._value.root) in differentiable:
                    self._recording.recorder.refuse("it returns views that share memory and get gradients")
                differentiable.add(id(handle._value.root))
            value = handle._value
            if value.copy is not None:
                self._recording.recorder.refuse(
                    "it returns a view that was taken of a redistributed copy: give a clone() of it"
                )
            output = Output(handle._spec, place.get(self._recording.id_of(handle)))
            if output.value is None and value.id not in self._outer.index_of_value:
                self._recording.recorder.refuse("it returns a tensor from where dtorch.compile cannot see")
                return
            if id(value.root) in bases:
                base = self._outer.index_of_value[value.id] if output.value is None else bases[id(value.root)]
                output.base = self.position[base]
            else:
                output.sharer = roots.setdefault(id(value.root), len(captured.outputs))
                if output.sharer == len(captured.outputs):
                    output.sharer = None
            captured.outputs.append(output)

    def guard(self, captured: Captured) -> None:
        """What must be as it was for the captured call to be used."""
        read = [self._outer.handles[i] for i in self.read]
        given = {id(t): i for i, t in enumerate(self._recording.arguments.tensors)}
        plain = [
            node.tensor
            for node in self._recording.recorder.tape.starts(self._recording.needed)
            if node.read is not None
        ]
        hosts = [
            t
            for t in self._recording.before.tensors.values()
            if type(t) is Tensor and t._host and any(t._host.plain is p for p in plain)
        ]
        containers = [edge.container for edge, _, _ in self._recording.changes]
        without = [p for section in self._recording.recorder.sections for p, grad in section.grads if grad is None]
        without += [t for t in self._recording.recorder.without_grad if self._recording.before.saw(t)]
        absent = [Edge("grad", tensor, None) for tensor in without]
        absent = [edge for edge in absent if edge.place not in self._recording.before.edges]
        containers += [edge.container for edge in absent]
        used = [
            one
            for one in (*read, *plain, *hosts, *self._recording.returned, *self._recording.given_back, *containers)
            if self._recording.before.saw(one)
        ]
        ways = {edge.place: (edge, child) for edge, child in self._recording.before.ways(used)}
        ways.update({edge.place: (edge, None) for edge in absent})
        for edge, was, _ in self._recording.changes:
            if isinstance(was, Tensor) and edge.place not in ways:
                ways[edge.place] = edge, ANY_TENSOR
            elif not isinstance(was, torch.Tensor):
                ways[edge.place] = edge, was
        written = {edge.place for edge, _, _ in self._recording.changes}
        modules = self._recording.before.modules
        asked = with_mode(modules, self._recording.asked)
        captured.guards = guards = Guards(list(ways.values()), modules, asked, written)
        at = {edge.place: i for i, edge in enumerate(guards.edges)}
        guards.tie(list(ways.values()), given)
        leaves, moving, fixed = [], [], []
        for index, handle in zip(self.read, read, strict=True):
            if id(handle) in given:
                leaves.append((index, given[id(handle)]))
        for index, handle in zip(self.read, read, strict=True):
            if id(handle) not in given:
                edge = self._outer.edge_of(handle)
                place = at[edge.place]
                if place < guards.moving:
                    moving.append((index, place))
                else:
                    fixed.append((index, place - guards.moving))
        order = [index for index, _ in (*leaves, *moving, *fixed)]
        # `handles` puts arguments first: renumber what was numbered before.
        moved = {self.position[index]: number for number, index in enumerate(order)}
        captured.leaves = [i for _, i in leaves]
        captured.moving = [i for _, i in moving]
        captured.fixed = [i for _, i in fixed]
        captured.specs = [self._outer.specs[i] for i in order]
        captured.requires_grad = [self._outer.handles[i].requires_grad for i in order]
        count = len(order)
        captured.sources = [[moved.get(s, s) if s < count else s for s in sources] for sources in captured.sources]
        captured.written = [moved[i] for i in captured.written]
        for number in self._recording.recorder.reads:
            number.source = moved.get(number.source, number.source) if number.source < count else number.source
        self.pool = {value: moved.get(at, at) if at < count else at for value, at in self.pool.items()}
        captured.made = [(None if base is None else moved[base], group) for base, group in captured.made]
        for output in captured.outputs:
            output.base = None if output.base is None else moved[output.base]
        first: dict[int, int] = {}
        for number, index in enumerate(order):
            value = self._outer.values[index].id
            if first.setdefault(value, number) != number:
                captured.twins.append((first[value], number))
        for edge, _, output in self._recording.changes:
            captured.bindings.append(Binding(edge, output))
        held = {id(tensor) for tensor in (*read, *self._recording.returned)}
        captured.released = [
            e
            for e, was, _ in self._recording.changes
            if e.kind == "grad" and isinstance(was, Tensor) and id(was) not in held
        ]
        self.position = {index: moved[at] for index, at in self.position.items()}
        captured.rebound = [(self.position[index], output) for index, output in self._recording.rebound]
