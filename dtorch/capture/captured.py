"""A captured call: what must hold for it to be used again, and how it is run."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from typing import Any

import torch

from ..client import aliasing, handles, lines, rebinding, runtime, torch_internals
from ..client.controller import AHEAD, Controller
from ..client.handles import wrap, wrap_view
from ..client.values import Value, new_value, next_value_id
from ..interrupts import critical
from ..program.compose import Segment
from ..program.text import lines_of
from ..sharding.spec import Spec
from . import plain, reads
from .guards import Guards
from .outside import Edge
from .parts import Binding, Call, Output, Stage
from .plain import Mismatch
from .results import Maker
from .straight import Straight, is_straight

_value_of = operator.attrgetter("_value")
_id_of = operator.attrgetter("_value.id")
_spec_of = operator.attrgetter("_spec")
_requires_grad = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]


def annotated(segment: Segment) -> list[tuple[str, str]]:
    """Each instruction of a program as text, with the user's line."""
    return [
        (text, lines.text(origin.line)) for text, origin in zip(lines_of(segment.program), segment.origins, strict=True)
    ]


def _ids(handles: list[Any]) -> list[int]:
    try:
        return list(map(_id_of, handles))
    except AttributeError:  # not one of ours, or not placed
        raise Mismatch from None


def _check(handles: list[Any], specs: list[Spec]) -> None:
    """Raise `Mismatch` if these are not handles of such specs."""
    if any(map(operator.is_not, map(_spec_of, handles), specs)):
        raise Mismatch


def _are_views_of_copies(handles: list[Any]) -> bool:
    return any(value.copy is not None for value in map(_value_of, handles))


class Captured:
    """The programs of one recorded call."""

    def __init__(self, name: str, objects: list[Any]) -> None:
        self.name = name
        self.objects = objects
        self.guards: Guards
        #: Which handles the programs read: tensors of the arguments by index, then tensors at places that move, then at others.
        self.leaves: list[int] = []
        self.moving: list[int] = []
        self.fixed: list[int] = []
        self.specs: list[Spec] = []
        self.requires_grad: list[bool] = []
        #: Handles that are one object, or on one value: the index of the first such, for each.
        self.twins: list[tuple[int, int]] = []
        self.checks_grad = False
        self.numbers: list[Any] = []
        self.items: list[Any] = []
        self.reads: list[reads.Read] = []
        self.stages: list[Stage] = []
        self.starts: list[plain.Node] = []
        #: Those of them that come from outside and are written.
        self.rewritten: list[plain.Node] = []
        #: Those that it draws from.
        self.generators: list[torch.Generator] = []
        #: A call may turn out to be another one when it has begun to do its own part.
        self.may_fail = True
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
        #: Places of gradients that it replaces, or takes away, without reading them.
        self.released: list[Edge] = []
        self.written: list[int] = []
        #: Handles that refer to something else after the call (``p.data = …``), each with the output that says what.
        self.rebound: list[tuple[int, int]] = []
        #: Where the tensors from outside are that are returned as they are.
        self.returned: list[Edge] = []
        self.result: Maker
        self.nbytes = 0
        self.instructions = 0
        self.gradient: Any = None
        #: The code of a call that this is all of.
        self.straight: Straight | None = None
        #: The numbers of the values of handles that move, as they were last; None if some are views that a call has to `refresh`.
        self._last: list[int] | None = None
        #: `handles.version`, the handles at places that do not move, and the numbers of their values.
        self._known: tuple[Any, list[Any], list[int]] = (None, [], [])

    def handles(self, tensors: list[torch.Tensor]) -> tuple[list[Any], list[int]]:
        """The handles that the programs read, each as it must be, and the numbers of their values; or `Mismatch`."""
        guards = self.guards
        moved = guards.find(tensors)
        found: list[Any] = [tensors[i] for i in self.leaves]
        found += [moved[i] for i in self.moving]
        ids = _ids(found)
        if ids != self._last:
            _check(found, self.specs[: len(found)])
            self._last = None if _are_views_of_copies(found) else ids
        may_be_stale = self._last is None
        version, others, known = self._known
        if version is not handles.version or guards.loose:
            version = handles.version
            others, known = self.handles_outside()
            self._known = version, others, known
        found += others
        ids = ids + known
        if any(ids[a] != ids[b] for a, b in self.twins):
            raise Mismatch
        if may_be_stale:
            self.refresh(found)
        if self.checks_grad:
            with torch_internals.past_functions():
                if list(map(_requires_grad, found)) != self.requires_grad:
                    raise Mismatch
        return found, ids

    def handles_outside(self) -> tuple[list[Any], list[int]]:
        """The handles at places that do not move, each as it must be, and the numbers of their values; or `Mismatch`."""
        found = [self.guards.fixed[i] for i in self.fixed]
        ids = _ids(found)
        _check(found, self.specs[len(self.leaves) + len(self.moving) :])
        if _are_views_of_copies(found):
            raise Mismatch
        return found, ids

    def refresh(self, handles: list[Any]) -> None:
        """Bring arguments that are views taken of redistributed copies up to date for a call, or `Mismatch` if it does more than read them.

        Args:
            handles: those that the programs read.
        """
        controller = runtime.controller()
        written = {id(handles[index]._value.root) for index in self.written}
        returned = {output.base for output in self.outputs}
        for index, handle in enumerate(handles):
            value = handle._value
            if value.copy is None:
                continue
            if index >= len(self.leaves) or id(value.root) in written or index in returned:
                raise Mismatch
            aliasing.tell([handle])
            with controller.lock:
                aliasing.refresh(controller, value)

    def run(self, tensors: list[torch.Tensor]) -> Any:
        """The result of a call whose arguments' tensors are these; `Mismatch` if it has to be recorded anew."""
        if self.straight is not None:
            return self.straight.run(self, tensors)
        handles, ids = self.handles(tensors)
        call = Call(self, tensors)
        call.handles = handles
        call.returned = [edge.get() for edge in self.returned]
        controller = runtime._controller
        assert controller is not None
        call.pool = ids
        call.pool += [value.id for value in self.constants]
        call.pool += [0] * len(self.puts)
        if self.items or self.starts or self.reads:
            self._in_stages(controller, call)
        else:
            self._issue(controller, call, len(self.segments), last=True)
        values = call.made
        if self.written and not torch.is_inference_mode_enabled():
            torch.autograd.graph.increment_version([handles[i] for i in self.written])
        outputs = self._outputs(call, values)
        if self.gradient is not None:
            outputs = self.gradient.attach(call, values, outputs)
        if self.bindings:
            self._bind(outputs)
        for index, output in self.rebound:
            rebinding.rebind(handles[index], outputs[output])
        result = self.result(outputs, tensors, call.returned, call.plain)
        self.pace(controller)
        return result

    def _in_stages(self, controller: Controller, call: Call) -> None:
        """Do the client's own part, random keys, plain work and optimizers' numbers, and queue the programs, up to each value that is
        read, which has to be what it was. A `Mismatch` undoes what was written and drawn on the client."""
        if self.may_fail:
            for generator in self.generators:
                call.undo.append((generator.set_state, generator.get_state()))
        found: list[Any] = []
        programs = 0
        try:
            call.env = plain.given(self.starts, call, self.variable)
            for node in self.rewritten if self.may_fail else ():
                tensor = call.plain(node)
                call.undo.append((tensor.copy_, tensor.detach().clone()))
            for stage in self.stages:
                for item in stage.items:
                    if type(item) is plain.Entry:
                        item.run(call.env)
                    else:
                        item.run(call)
                programs += stage.programs
                self._issue(controller, call, programs, last=stage.read is None)
                if stage.read is not None:
                    found.append(stage.read.again(controller, self._value_at(call, stage.read.source)))
                    if not reads.same(found[-1], stage.read.found):
                        raise Mismatch(tuple(found))
        except Mismatch:
            with torch.no_grad():
                for restore, state in reversed(call.undo):
                    restore(state)
            raise

    def begins(self, found: tuple[Any, ...]) -> bool:
        """Whether a call that has read these values so far may be this one."""
        return all(map(reads.same, found, [read.found for read in self.reads]))

    def _value_at(self, call: Call, source: int) -> Value:
        """What is at a place of the pool."""
        for found in (
            [handle._value for handle in call.handles],
            self.constants,
            [call.values.get(put) for put in self.puts],
            call.made,
        ):
            if source < len(found):
                return found[source]  # type: ignore[return-value]
            source -= len(found)
        raise IndexError

    @critical
    def _issue(self, controller: Controller, call: Call, end: int, *, last: bool) -> None:
        """Queue the programs up to number ``end``; after the ``last`` time nothing goes back."""
        handles, pool = call.handles, call.pool
        if self.puts:
            start = len(handles) + len(self.constants)
            for at, put in enumerate(self.puts, start):
                if put in call.values:
                    pool[at] = call.values[put].id
        with controller.lock:
            if last and self.released:
                self._release(controller)
            for index in range(call.programs, end):
                segment = self.segments[index]
                count = len(segment.outputs)
                for base, group in self.made[len(call.made) : len(call.made) + count]:
                    if base is None and group is None:
                        call.made.append(new_value())
                        continue
                    root = None
                    if base is not None:
                        root = handles[base]._value.root
                    elif group is not None:
                        root = call.roots.get(group)
                    value = Value(next_value_id(), root)
                    call.made.append(value)
                    if group is not None and root is None:
                        call.roots[group] = value.root
                command = [self.programs[index]]
                command += [pool[i] for i in self.sources[index]]
                fresh = [value.id for value in call.made[len(call.made) - count :]]
                command += fresh
                pool += fresh
                command += [call.numbers[i] for i in segment.numbers]
                controller.issue(command, self.name, 5)
            call.programs = end
            if last:
                for index in self.written:
                    aliasing.written(controller, handles[index]._value)

    def _release(self, controller: Controller) -> None:
        """Let go of gradients that the call replaces unread: else they would live while the new ones are made."""
        torch_internals.set_grads((edge.container, None) for edge in self.released)
        controller.drain()

    def _bind(self, outputs: list[Any]) -> None:
        """Put what the call leaves behind to its places."""
        grads = []
        for binding in self.bindings:
            child = None if binding.output is None else outputs[binding.output]
            if binding.edge.kind == "grad":
                grads.append((binding.edge.container, child))
            else:
                binding.edge.put(child)
        torch_internals.set_grads(grads)

    def _outputs(self, call: Call, values: list[Value]) -> list[Any]:
        outputs: list[Any] = []
        for output in self.outputs:
            value = call.handles[output.base]._value if output.value is None else values[output.value]
            if output.base is not None:
                outputs.append(wrap_view(output.spec, value, call.handles[output.base]))
            elif output.sharer is not None:
                outputs.append(wrap_view(output.spec, value, outputs[output.sharer]))
            else:
                outputs.append(wrap(output.spec, value))
        return outputs

    def settle(self) -> None:
        """All is known."""
        sizes = Counter(group for _, group in self.made)
        self.made = [(base, group if sizes[group] > 1 else None) for base, group in self.made]
        if is_straight(self):
            self.straight = Straight(self)

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        """Whether `run` would be used for a call with these tensors, as far as can be told without running anything."""
        try:
            if self.straight is not None:
                self.straight.check(self.straight, self, tensors)
            else:
                self.handles(tensors)
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
        for one, two in itertools.zip_longest(map(str, self.reads), map(str, other.reads), fillvalue="nothing is read"):
            if one != two:
                return f"a value that is read\n  recorded: {one}\n  now:      {two}"
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
        segments = iter(self.segments)
        for stage in self.stages:
            for segment in itertools.islice(segments, stage.programs):
                text.append(f"program on mesh {segment.program.mesh}, %0 to %{segment.program.inputs - 1} given:")
                rows = annotated(segment)
                width = min(90, max((len(row) for row, _ in rows), default=0))
                text += [f"  {row.ljust(width)}  # {line}" if line else f"  {row}" for row, line in rows]
                text.append(f"  return {', '.join(f'%{slot}' for slot in segment.program.outputs)}")
            if stage.read is not None:
                text.append(str(stage.read))
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
