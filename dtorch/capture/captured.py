"""A captured call: what must hold for it to be used again, and how it is run."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..client import aliasing, dispatch, lines, runtime, special
from ..client.controller import AHEAD, Controller
from ..client.interrupts import critical
from ..client.values import Root, Value, next_value_id
from ..program.compose import Segment
from ..program.text import lines_of
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import plain
from .outside import Edge
from .plain import Mismatch
from .results import Maker

_value_of = operator.attrgetter("_value")
_id_of = operator.attrgetter("_value.id")
_spec_of = operator.attrgetter("_spec")
_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]

#: What stands for a place that held no tensor and nothing that holds one: None, a number, or nothing at all.
NOTHING: Any = object()
#: What stands for a place that held a tensor which was not used.
ANY_TENSOR: Any = object()


@dataclasses.dataclass(slots=True)
class Output:
    """One handle that a call makes: on value ``value`` of the program, or, if that is None, on what handle ``base`` refers to.

    ``base``: the handle whose memory it is a view of; ``sharer``: the earlier output that has the same memory.
    """

    spec: Spec
    value: int | None
    base: int | None = None
    sharer: int | None = None


@dataclasses.dataclass(slots=True)
class Binding:
    """After the call, output ``output`` (none: None) is at ``edge``, which is guard ``guard``."""

    edge: Edge
    output: int | None
    guard: int


class Call:
    """One run of a captured program, while it is put together."""

    __slots__ = ("captured", "tensors", "found", "numbers", "values", "env", "handles", "returned", "undo")

    def __init__(self, captured: Captured, tensors: list[torch.Tensor], found: list[Any]) -> None:
        self.captured = captured
        self.tensors = tensors
        #: What is at the guarded edges.
        self.found = found
        self.numbers = list(captured.numbers)
        self.values: dict[int, Value] = {}
        self.env: dict[int, torch.Tensor] = {}
        self.handles: list[Any] = []
        #: What the result has of `Captured.returned`, as it was before the call.
        self.returned: list[Any] = []
        #: What makes undone what the call has changed on the client: functions, each with the state to be given.
        self.undo: list[tuple[Callable[[Any], Any], torch.Tensor]] = []

    def plain(self, node: plain.Node) -> torch.Tensor:
        return plain.window(node, self.env)


def _hooks_of(tensors: list[torch.Tensor]) -> list[Any]:
    return [hooks for t in tensors for hooks in (t._backward_hooks, t._post_accumulate_grad_hooks)]


class Guards:
    """Places outside of the function and what is there: objects that must stay, tensors that must stay of their kind."""

    def __init__(self, ways: list[tuple[Edge, Any]], modules: list[torch.nn.Module]) -> None:
        flags = [(Edge("dict", module.__dict__, "training"), module.training) for module in modules]
        every = sorted([*ways, *flags], key=lambda way: way[0].kind != "dict")
        self.edges = [edge for edge, _ in every]
        # A gradient is not held on to: nobody may want it any more.
        self.expected = [ANY_TENSOR if e.kind == "grad" and isinstance(c, Tensor) else c for e, c in every]
        owners = {id(edge.container) for edge in self.edges if edge.kind == "grad"}
        #: Tensors whose gradients are read or written: each has to stay itself.
        self._owners = [(at, child) for at, (_, child) in enumerate(every) if id(child) in owners]
        count = sum(edge.kind == "dict" for edge in self.edges)
        self._dicts = [edge.container for edge in self.edges[:count]]
        self._keys = [edge.key for edge in self.edges[:count]]
        self._others = self.edges[count:]
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [getattr(module, kind) for module in modules for kind in kinds]
        self._hooks += [getattr(torch.nn.modules.module, f"_global{kind}") for kind in kinds]
        self._hooked = [child for _, child in every if isinstance(child, torch.Tensor)]
        self._newest_hook = RemovableHandle.next_id
        self._used_hooks = [hooks for hooks in (*self._hooks, *_hooks_of(self._hooked)) if hooks]
        self._hook_counts = list(map(len, self._used_hooks))

    def find(self) -> list[Any]:
        """What is at the edges now, or `Mismatch`."""
        found = list(map(dict.get, self._dicts, self._keys))
        if self._others:
            found += [edge.get() for edge in self._others]
        if any(map(operator.is_not, found, self.expected)):
            for child, expected in zip(found, self.expected, strict=True):
                if child is expected:
                    continue
                if expected is NOTHING:
                    if not isinstance(child, (type(None), int, float, str)):
                        raise Mismatch
                elif expected is ANY_TENSOR:
                    if type(child) is not Tensor:
                        raise Mismatch
                elif not isinstance(expected, torch.Tensor) or type(child) is not type(expected):
                    raise Mismatch
            if any(found[at] is not owner for at, owner in self._owners):
                raise Mismatch
        if self._hook_counts and list(map(len, self._used_hooks)) != self._hook_counts:
            raise Mismatch
        if self._newest_hook != RemovableHandle.next_id:
            hooks = (*self._hooks, *_hooks_of(self._hooked))
            if any(id >= self._newest_hook for given in hooks for id in given or ()):
                raise Mismatch
            self._newest_hook = RemovableHandle.next_id
        return found


def annotated(segment: Segment) -> list[tuple[str, str]]:
    """Each instruction of a program as text, with the user's line."""
    return [
        (text, lines.text(origin.line)) for text, origin in zip(lines_of(segment.program), segment.origins, strict=True)
    ]


class Captured:
    """The programs of one recorded call."""

    def __init__(self, name: str, objects: list[Any]) -> None:
        self.name = name
        self.objects = objects
        self.guards: Guards
        #: Which handles the programs read: tensors of the arguments by index, tensors at guarded edges.
        self.leaves: list[int] = []
        self.places: list[int] = []
        self.specs: list[Spec] = []
        self.requires_grad: list[bool] = []
        #: Handles that are one object, or on one value: the index of the first such, for each.
        self.twins: list[tuple[int, int]] = []
        self.checks_grad = False
        self.numbers: list[Any] = []
        self.items: list[Any] = []
        self.starts: list[plain.Node] = []
        #: Those of them that come from outside and are written.
        self.rewritten: list[plain.Node] = []
        #: Those that it draws from.
        self.generators: list[torch.Generator] = []
        self.variable: set[int] = set()
        self.segments: list[Segment] = []
        self.programs: list[int] = []
        #: Where the inputs of each segment are: in handles, then constants, then puts, then values made by earlier segments.
        self.sources: list[list[int]] = []
        self.constants: list[Value] = []
        #: What the constants are, where every call is verified.
        self.sent: list[torch.Tensor] = []
        self.puts: list[int] = []
        #: For each value that the programs make: the handle whose memory it has, or a number that those with the same memory share.
        self.made: list[tuple[int | None, int | None]] = []
        self.outputs: list[Output] = []
        self.bindings: list[Binding] = []
        self.written: list[int] = []
        #: Handles that refer to something else after the call (``p.data = …``), each with the output that says what.
        self.rebound: list[tuple[int, int]] = []
        #: Where the tensors from outside are that are returned as they are.
        self.returned: list[Edge] = []
        self.result: Maker
        self.nbytes = 0
        self.instructions = 0
        self.gradient: Any = None
        self._last: list[int] = []

    def handles(self, tensors: list[torch.Tensor], found: list[Any]) -> list[Any]:
        """The handles that the programs read, each as it must be; or `Mismatch`."""
        handles = [tensors[i] for i in self.leaves]
        handles += map(found.__getitem__, self.places)
        try:
            ids = list(map(_id_of, handles))
        except AttributeError:  # not one of ours, or not placed
            raise Mismatch from None
        if ids != self._last:
            if any(map(operator.is_not, map(_spec_of, handles), self.specs)):
                raise Mismatch
            if any(ids[a] != ids[b] for a, b in self.twins) or any(v.copy is not None for v in map(_value_of, handles)):
                raise Mismatch
            self._last = ids
        if self.checks_grad and list(map(_requires_grad, handles)) != self.requires_grad:
            raise Mismatch
        return handles

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The result of a call whose arguments' tensors are these; `Mismatch` if it has to be recorded anew."""
        found = self.guards.find()
        handles = self.handles(tensors, found)
        call = Call(self, tensors, found)
        call.handles = handles
        call.returned = [edge.get() for edge in self.returned]
        if self.items or self.starts:
            self._prepare(call)
        controller = runtime._controller
        assert controller is not None
        values = self._issue(controller, call)
        if self.written and not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version([handles[i] for i in self.written])
        outputs = self._outputs(call, values)
        if self.gradient is not None:
            outputs = self.gradient.attach(call, values, outputs)
        for binding in self.bindings:
            child = None if binding.output is None else outputs[binding.output]
            binding.edge.put(child)
            if child is not None and isinstance(self.guards.expected[binding.guard], torch.Tensor):
                self.guards.expected[binding.guard] = child
        for index, output in self.rebound:
            special.rebind(handles[index], outputs[output])
        call.handles = outputs
        result = self.result(call)
        self.pace(controller)
        return result

    def _prepare(self, call: Call) -> None:
        """The client's own part: random keys, plain work, optimizers' numbers. A `Mismatch` undoes what they wrote and drew."""
        for generator in self.generators:
            call.undo.append((generator.set_state, generator.get_state()))
        try:
            call.env = plain.given(self.starts, call, self.variable)
            for node in self.rewritten:
                tensor = call.plain(node)
                call.undo.append((tensor.copy_, tensor.detach().clone()))
            for item in self.items:
                if type(item) is plain.Entry:
                    item.run(call.env)
                else:
                    item.run(call)
        except Mismatch:
            with torch.no_grad():
                for restore, state in reversed(call.undo):
                    restore(state)
            raise

    @critical
    def _issue(self, controller: Controller, call: Call) -> list[Value]:
        """Queue the programs; the values they make."""
        handles = call.handles
        pool = list(map(_id_of, handles))
        pool += [value.id for value in self.constants]
        pool += [call.values[put].id for put in self.puts]
        values: list[Value] = []
        roots: dict[int, Root] = {}
        for base, group in self.made:
            root = None
            if base is not None:
                root = handles[base]._value.root
            elif group is not None:
                root = roots.get(group)
            values.append(Value(next_value_id(), root))
            if group is not None and root is None:
                roots[group] = values[-1].root
        at = len(pool)
        pool += [value.id for value in values]
        with controller.lock:
            for program, sources, segment in zip(self.programs, self.sources, self.segments, strict=True):
                command = [program]
                command += [pool[i] for i in sources]
                count = len(segment.outputs)
                command += pool[at : at + count]
                at += count
                command += [call.numbers[i] for i in segment.numbers]
                controller.issue(command, self.name, 5)
            for index in self.written:
                aliasing.written(controller, handles[index]._value)
        return values

    def _outputs(self, call: Call, values: list[Value]) -> list[Any]:
        outputs: list[Any] = []
        for output in self.outputs:
            value = call.handles[output.base]._value if output.value is None else values[output.value]
            if output.base is not None:
                outputs.append(dispatch.wrap_view(output.spec, value, call.handles[output.base]))
            elif output.sharer is not None:
                outputs.append(dispatch.wrap_view(output.spec, value, outputs[output.sharer]))
            else:
                outputs.append(dispatch.wrap(output.spec, value))
        return outputs

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        """Whether `run` would be used for a call with these tensors, as far as can be told without running anything."""
        try:
            self.handles(tensors, self.guards.find())
        except Mismatch:
            return False
        return True

    def difference(self, other: Captured) -> str | None:
        """The first line of the user's where ``other`` does something else; None if it does the same."""
        here = [line for segment in self.segments for line in annotated(segment)]
        there = [line for segment in other.segments for line in annotated(segment)]
        for one, two in itertools.zip_longest(here, there, fillvalue=("nothing", "")):
            if one[0] != two[0]:
                return f"{two[1] or one[1]}\n  recorded: {one[0]}\n  now:      {two[0]}"
        for one, two in zip(self.sent, other.sent, strict=False):
            if one.shape != two.shape or not torch.equal(one, two):
                return f"a constant made on the client\n  recorded: {one}\n  now:      {two}"
        return None

    def __str__(self) -> str:
        text = [f"{self.name}: {self.instructions} instructions"]
        if self.gradient is not None:
            text[0] += f"; {len(self.gradient.backwards)} backward programs"
        for index, spec in enumerate(self.specs):
            where = f"argument {self.leaves[index]}" if index < len(self.leaves) else "from outside"
            text.append(f"  input {index}: {tuple(spec.shape)} {spec.dtype} {spec.placements}, {where}")
        for segment in self.segments:
            text.append(f"program on mesh {segment.program.mesh}, %0 to %{segment.program.inputs - 1} given:")
            rows = annotated(segment)
            width = min(90, max((len(row) for row, _ in rows), default=0))
            text += [f"  {row.ljust(width)}  # {line}" if line else f"  {row}" for row, line in rows]
            text.append(f"  return {', '.join(f'%{slot}' for slot in segment.program.outputs)}")
        return "\n".join(text)

    def pace(self, controller: Controller) -> None:
        """Keep the client from running too far ahead: one command is as many instructions here."""
        controller.bytes_ahead += self.nbytes
        controller.pressure()
        engine = controller.engine
        if self.instructions * engine.behind() > AHEAD:
            with controller.lock:
                controller.flush()
            engine.wait_behind(max(1, AHEAD // (2 * self.instructions)))
        if controller.sync:
            controller.synchronize()
