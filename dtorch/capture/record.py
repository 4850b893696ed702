"""One call of a function, run as it is and recorded: what it returns, and the captured call that does the same again."""

from __future__ import annotations

import gc
import operator
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..client import dispatch, host, lines, runtime, special, watch
from ..client.values import Value
from ..program.compose import Command, Segment, compose
from ..sharding.spec import mesh_id
from ..tensor import Tensor
from . import passes
from .arguments import Arguments
from .captured import Binding, Call, Captured, Output, Stage
from .gradients import Gradient, backward_of, differentiate
from .guards import ANY_TENSOR, NOTHING, Guards
from .optimizers import settings_of
from .outside import Edge, Outside, contents_of, grad_of
from .plain import PLAIN, Entry
from .reads import Read
from .recorder import Key, Put, Recorder, copying
from .results import maker_of


class Recording:
    """One call, recorded. ``captured`` is None where ``refused`` says why it cannot be used again, or ``passing`` why not yet."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        args: Any,
        kwargs: Any,
        arguments: Arguments,
        *,
        keeps_constants: bool = False,
    ) -> None:
        self._keeps_constants = keeps_constants
        self.name = name
        self.arguments = arguments
        self.roots = [function, *arguments.objects]
        self.before = Outside(self.roots)
        self.given_before = Outside([list(args), kwargs])
        self.contents = self.given_before.contents()
        self.recorder = recorder = Recorder()
        #: Handles from outside: tensors of the arguments first.
        self.outer: list[Any] = []
        #: What they referred to before the call.
        self.values: list[Value] = []
        self.specs: list[Any] = []
        self._noted: set[int] = set()
        self._index_of_value: dict[int, int] = {}
        self._generations: dict[int, int] = {}
        self._edges: dict[int, Edge] = {}
        self._tell_of_outside()
        self.graphs = [tensor.grad_fn for tensor in self.outer]
        recorder.roots = list({id(v.root): (v.root, v.root.generation) for v in self.values}.values())
        torch.clear_autocast_cache()  # a cast that was made before is no part of this call
        grads = [grad_of(tensor) if tensor.is_leaf else None for tensor in self.arguments.tensors]
        with recorder, self._telling_of_backward():
            self.result = function(*args, **kwargs)
        for tensor, grad in zip(self.arguments.tensors, grads, strict=True):
            if tensor.is_leaf and grad_of(tensor) is not grad:
                recorder.refuse(
                    "it changes the gradient of an argument: keep what gets gradients in a module or closure"
                )
        torch.clear_autocast_cache()
        self.captured: Captured | None = None
        self.after = Outside(self.roots)
        if recorder.refused is None:
            self.captured = self._capture(args, kwargs)
        self.refused, self.passing = recorder.refused, recorder.passing
        if self.refused or self.passing:
            self.captured = None

    # -- before

    def _tell_of_outside(self) -> None:
        recorder = self.recorder
        if not self.before.is_complete:
            recorder.refuse("too many objects are in reach of the function")
        for index, tensor in enumerate(self.arguments.tensors):
            if type(tensor) is not Tensor:
                recorder.tape.outside(tensor, lambda call, i=index: call.tensors[i])
            elif tensor._spec is None:
                recorder.tape.outside(tensor._host.plain, lambda call, i=index: _memory(call.tensors[i]))
            else:
                self._outer(tensor)
        for edge, child in self.before.edges.values():
            if not isinstance(child, torch.Tensor):
                continue
            if type(child) in PLAIN:
                recorder.tape.outside(child, lambda call, edge=edge: edge.get())
            elif type(child) is Tensor and child._spec is None:
                recorder.tape.outside(child._host.plain, lambda call, edge=edge: _memory(edge.get()))
            elif type(child) is Tensor:
                self._outer(child)

    def _outer(self, tensor: Any) -> None:
        """Note a handle from outside, once: it may be in several places."""
        if id(tensor) in self._noted:
            return
        self._noted.add(id(tensor))
        value = tensor._value
        self._index_of_value.setdefault(value.id, len(self.outer))
        self.values.append(value)
        self.specs.append(tensor._spec)
        self._generations[id(value.root)] = value.root.generation
        self.outer.append(tensor)

    @contextmanager
    def _telling_of_backward(self) -> Iterator[None]:
        """Refuse a backward that leaves the function: what comes after such a tensor is another graph at every call."""

        def told(grad: Any) -> None:
            self.recorder.refuse("a backward inside goes on into what a tensor from outside was made of")

        tensors = {id(t): t for t in (*self.arguments.tensors, *self.before.tensors.values()) if t.requires_grad}
        ended = [t for t in tensors.values() if not t.is_leaf or type(t) is not Tensor or t._spec is None]
        hooks = [tensor.register_hook(told) for tensor in ended]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # -- afterwards

    def _capture(self, args: Any, kwargs: Any) -> Captured | None:
        recorder = self.recorder
        captured = Captured(self.name, self.arguments.objects)
        captured.checks_grad = recorder.with_grad
        made = {value for command in recorder.commands for value in command.outputs}
        self._find_outputs(captured, made)
        self._find_changes(args, kwargs, made)
        recorder.tape.settle()
        if any(t.grad_fn is not graph for t, graph in zip(self.outer, self.graphs, strict=True)):
            recorder.refuse("it writes in place, with autograd, to a tensor from outside")
        used = [put.node for put in recorder.puts.values()] + [n for e in recorder.tape.entries for n in e.inputs]
        if recorder.with_grad and any(node.tensor.requires_grad for node in used):
            recorder.refuse("a plain tensor requires gradients: place it with dtorch.from_torch")
        for section in recorder.sections:
            if settings_of(section.optimizer) != section.settings:
                recorder.refuse("it changes the settings of an optimizer: let a scheduler step outside")
        if recorder.refused or recorder.passing:
            return None
        gradient, backwards = self._differentiate()
        if recorder.refused:
            return None
        commands = self._with_fresh_constants(recorder.commands)
        read_later = {v for backward in backwards for c in backward[3].commands for v in c.inputs}
        kept = {self._id(handle) for handle in self.handles} | {self.fresh.get(v, v) for v in read_later}
        pieces = self._composed(commands, kept & (made | set(self.fresh.values())))
        segments = [segment for piece in pieces for segment in piece]
        self._find_inputs(captured, segments, read_later)
        if recorder.refused:
            return None
        self._guard(captured)
        self._finish(captured, segments)
        self._stage(captured, list(map(len, pieces)))
        if gradient is not None:
            gradient.inputs = [self.position[i] for i in gradient.inputs]
            gradient.backwards = [backward_of(b, self.name, self.pool, recorder) for b in backwards]
            if recorder.refused:
                return None
            captured.gradient = gradient
            self._attach(captured)
            read_later |= {value.id for value in self.values}
        del backwards
        if self._is_hidden(made - read_later):
            recorder.refuse("a tensor made in the function is kept where dtorch.compile cannot see")
        return captured

    def _composed(self, commands: list[Command], kept: set[int]) -> list[list[Segment]]:
        """The programs up to each value that is read, and those after the last."""
        reads = self.recorder.reads
        added = len(commands) - len(self.recorder.commands)
        ends = [*[added + read.commands for read in reads], len(commands)]
        for read in reads:
            read.id = self.fresh.get(read.id, read.id)
        wanted = kept | {read.id for read in reads}
        pieces = []
        for start, end in zip([0, *ends][-2::-1], ends[::-1], strict=True):
            pieces.append(compose(self.name, commands[start:end], wanted, passes.chosen()))
            wanted = wanted.union(*[segment.inputs for segment in pieces[-1]])
        return pieces[::-1]

    def _differentiate(self) -> tuple[Gradient | None, list[Any]]:
        """How the results get gradients, if they do; and the backwards as recorded."""
        if any(handle.requires_grad and handle.grad_fn is None for handle in self.handles):
            self.recorder.refuse("it makes a leaf that requires gradients")
        if not any(handle.grad_fn is not None for handle in self.handles):
            return None, []
        used = {value for command in self.recorder.commands for value in command.inputs}
        read = {i for i, value in enumerate(self.values) if value.id in used}
        try:
            outputs, inputs, found, reach = differentiate(self.handles, self.outer, read, self.recorder)
        except (
            RuntimeError
        ) as error:  # the graph is used up, or its tensors were written: told when there is a backward
            outputs = [i for i, handle in enumerate(self.handles) if handle.grad_fn is not None]
            inputs = [i for i in sorted(read) if self.outer[i].requires_grad]
            return Gradient(self.name, outputs, inputs, [set() for _ in outputs], [], str(error)), []
        return Gradient(self.name, outputs, inputs, reach, []), found

    def _attach(self, captured: Captured) -> None:
        """Give the results of this call the node that those of later ones will have, and let go of its own graph."""
        call = Call(captured, self.arguments.tensors)
        order: list[Any] = [None] * len(self.read)
        for index in self.read:
            order[self.position[index]] = self.outer[index]
        call.handles = order
        call.returned = self.returned
        call.values = {put.id: put.value for put in self.recorder.puts.values()}
        call.numbers = list(self.recorder.numbers)
        call.env = {node.index: node.tensor for node in self.needed}
        wanted = set(self.inner)
        found = {one.id: one for one in gc.get_objects() if type(one) is Value and one.id in wanted}
        found |= {copy: self.recorder.puts[put].value for put, copy in self.fresh.items()}
        values: Any = [found.get(value) for value in self.inner]  # those that backward reads are alive
        differentiable = set(captured.gradient.outputs)
        outputs = [dispatch.wrap(h._spec, h._value) if i in differentiable else h for i, h in enumerate(self.handles)]
        call.handles = captured.gradient.attach(call, values, outputs)
        for edge, _, output in self.changes:
            if output in differentiable:
                edge.put(call.handles[output])
        self.result = captured.result(call)
        self.handles = call.handles

    def _find_outputs(self, captured: Captured, made: set[int]) -> None:
        """The tensors of the result."""
        #: Handles that a call makes, each once.
        self.handles: list[Any] = []
        self.needed: list[Any] = []
        #: Tensors from outside that the call returns as they are.
        self.returned: list[Any] = []
        before = {id(t): i for i, t in enumerate(self.arguments.tensors)}

        def of_tensor(tensor: torch.Tensor) -> Any:
            if id(tensor) in before:
                index = before[id(tensor)]
                return lambda call: call.tensors[index]
            if type(tensor) is Tensor and tensor._spec is not None:
                if self.before.saw(tensor) and tensor._value.id not in made:
                    captured.returned.append(self._edge_of(tensor))
                    self.returned.append(tensor)
                    at = len(self.returned) - 1
                    return lambda call: call.returned[at]
                number = self._handle(tensor)
                return lambda call: call.handles[number]
            plain = tensor._host.plain if type(tensor) is Tensor else tensor
            if type(plain) not in PLAIN or (type(tensor) is Tensor and tensor._host.root.joined is not None):
                self.recorder.refuse(f"it returns a {type(tensor).__name__} that is not of the mesh")
                return lambda call: tensor
            node = self.recorder.tape.node(plain)
            self.needed.append(node)
            wrap = host.make if type(tensor) is Tensor else lambda found: found

            def make(call: Any) -> Any:
                found = call.plain(node)
                return wrap(found.clone() if node.storage not in captured.variable else found)

            return make

        captured.result = maker_of(self.result, of_tensor, self.before.saw, self.recorder.refuse)

    def _edge_of(self, tensor: Any) -> Edge:
        if not self._edges:
            for edge, child in self.before.edges.values():
                if isinstance(child, torch.Tensor):
                    self._edges.setdefault(id(child), edge)
        return self._edges[id(tensor)]

    def _handle(self, tensor: Any) -> int:
        for index, handle in enumerate(self.handles):
            if handle is tensor:
                return index
        self.handles.append(tensor)
        return len(self.handles) - 1

    def _find_changes(self, args: Any, kwargs: Any, made: set[int]) -> None:
        """Where outside of the function other tensors are than before."""
        recorder = self.recorder
        #: (edge, what was there, the index of the handle that is there now or None)
        self.changes: list[tuple[Edge, Any, int | None]] = []
        existing = {id(edge.container) for edge, _ in self.before.edges.values()}
        existing |= {id(one) for one in self.before._seen.values()}
        for one in self.before._seen.values():
            own = getattr(one, "__dict__", None) if not isinstance(one, type) else None
            if type(own) is dict:
                existing.add(id(own))
            if isinstance(one, torch.nn.Module):
                existing |= {id(own[name]) for name in ("_parameters", "_buffers", "_modules")}
        for place, (edge, child) in self.after.edges.items():
            was = self.before.edges.get(place, (None, NOTHING))[1]
            if child is was or not isinstance(child, torch.Tensor):
                continue
            if type(child) is not Tensor or child._spec is None:
                recorder.once("it puts a plain tensor somewhere outside")
                continue
            if id(edge.container) not in existing or (edge.kind == "item" and was is NOTHING):
                recorder.once("it puts tensors into objects that it makes, or appends them to lists")
            else:
                self.changes.append((edge, was, self._handle(child)))
        for place, (edge, was) in self.before.edges.items():
            if isinstance(was, Tensor) and place not in self.after.edges:
                if edge.kind == "grad" or (edge.kind == "dict" and edge.key in edge.container):
                    self.changes.append((edge, was, None))
                elif edge.get() is not was:
                    recorder.once("it takes tensors out of objects outside")
        #: (index in `outer`, the index of a handle on what it refers to now)
        self.rebound: list[tuple[int, int]] = []
        for index, (handle, value) in enumerate(zip(self.outer, self.values, strict=True)):
            if handle._value is not value:
                self.rebound.append((index, self._handle(special.data_of(handle))))
        for place, (edge, child) in Outside([list(args), kwargs]).edges.items():
            known = self.given_before.edges.get(place, (edge, child))[1]
            if (
                isinstance(child, Tensor)
                and child is not known
                and place not in self.after.edges
                and edge.kind != "grad"
            ):
                recorder.refuse("it puts tensors into a list or dict that it is given")
        for container, items in self.contents:
            now = contents_of(container)
            if not self.before.saw(container) and (len(now) != len(items) or any(map(operator.is_not, now, items))):
                recorder.refuse("it changes a list or dict that it is given")

    def _with_fresh_constants(self, commands: list[Command]) -> list[Command]:
        """The commands, with a copy in place of every constant that they write, or return a view of."""
        held = {id(handle._value.root) for handle in self.handles}
        #: The number of the copy that stands for a constant.
        self.fresh: dict[int, int] = {}
        found = list(commands)
        outside = (*self.arguments.tensors, *self.before.tensors.values())
        for put in self.recorder.puts.values():
            root = put.value.root
            varies = put.node.storage in self.recorder.tape.variable
            if varies and root.generation and any(type(t) is Tensor and t._value is put.value for t in outside):
                self.recorder.once("it writes an uncommitted tensor from outside, which joins the mesh")
            if id(root) in held or (root.generation and not varies):
                copy = copying(mesh_id(put.spec.mesh))
                fresh = self.fresh[put.id] = -put.id
                found = [_renamed(command, put.id, fresh) for command in found]
                found.insert(0, Command(copy, [put.id], [fresh], [], "copy of a constant"))
        return found

    def _id(self, handle: Any) -> int:
        """The number of what a handle refers to, in the composed programs."""
        return self.fresh.get(handle._value.id, handle._value.id)

    def _find_inputs(self, captured: Captured, segments: list[Any], read_later: set[int]) -> None:
        """Where the inputs of the programs are in another call."""
        recorder = self.recorder
        inner = [value for segment in segments for value in segment.outputs]
        self.inner = inner
        known = set(self._index_of_value) | set(recorder.puts)
        later = [v for v in sorted(read_later) if v in known and v not in self.fresh]
        later += [read.id for read in recorder.reads if read.id not in set(inner)]
        used = list(dict.fromkeys([*[v for s in segments for v in s.inputs if v not in set(inner)], *later]))
        written = {i for i, v in enumerate(self.values) if v.root.generation != self._generations[id(v.root)]}
        lines = {value: command for command in reversed(recorder.commands) for value in command.inputs}
        bases = {id(value.root): i for i, value in reversed(list(enumerate(self.values)))}
        wanted = {self._index_of_value[v] for v in used if v in self._index_of_value}
        wanted |= {i for i in written if self._index_of_value[self.values[i].id] == i}
        wanted |= {i for i, _ in self.rebound}
        if any(handle.grad_fn is not None for handle in self.handles):
            read = {value for command in recorder.commands for value in command.inputs}
            wanted |= {i for i, v in enumerate(self.values) if v.id in read and self.outer[i].requires_grad}
        wanted |= {bases[id(h._value.root)] for h in self.handles if id(h._value.root) in bases}
        #: Indices in `outer` of the handles that a call reads: one of each value, then the others on the same value.
        self.read = sorted(wanted)
        values = {self.values[i].id for i in self.read}
        self.read += [i for i, value in enumerate(self.values) if value.id in values and i not in wanted]
        self.position = {index: at for at, index in enumerate(self.read)}
        captured.written = [self.position[i] for i in sorted(written) if i in self.position and i in wanted]
        sources: dict[int, int] = {}
        constants: list[Put] = []
        puts: list[Put] = []
        for value in used:
            put = recorder.puts.get(value)
            if value in self._index_of_value:
                sources[value] = self.position[self._index_of_value[value]]
                if self.values[self._index_of_value[value]].copy is not None:
                    recorder.refuse("it reads a view that was taken of a redistributed copy")
            elif put is None:
                command = lines.get(value)
                at = "" if command is None else f" at {line_of(command)}"
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
        self.pool = {**sources, **{put: sources[copy] for put, copy in self.fresh.items() if copy in sources}}
        captured.sources = [[sources[v] for v in segment.inputs] for segment in segments]
        for read in recorder.reads:
            read.source = sources[read.id]
        captured.constants = [put.spare if put.id in self.fresh else put.value for put in constants]
        if self._keeps_constants:
            captured.sent = [put.node.tensor for put in constants]
        captured.puts = [put.id for put in puts]
        self.needed += [put.node for put in puts]
        self._describe_outputs(captured, inner, bases)

    def _describe_outputs(self, captured: Captured, inner: list[int], bases: dict[int, int]) -> None:
        roots: dict[int, Any] = {}
        owners: dict[int, Any] = {self._id(handle): handle._value for handle in self.handles}
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
        for handle in self.handles:
            if handle.grad_fn is not None:
                if id(handle._value.root) in bases or id(handle._value.root) in differentiable:
                    self.recorder.refuse("it returns views that share memory and get gradients")
                differentiable.add(id(handle._value.root))
            value = handle._value
            if value.copy is not None:
                self.recorder.refuse("it returns a view that was taken of a redistributed copy")
            output = Output(handle._spec, place.get(self._id(handle)))
            if output.value is None and value.id not in self._index_of_value:
                self.recorder.refuse("it returns a tensor from where dtorch.compile cannot see")
                return
            if id(value.root) in bases:
                base = self._index_of_value[value.id] if output.value is None else bases[id(value.root)]
                output.base = self.position[base]
            else:
                output.sharer = roots.setdefault(id(value.root), len(captured.outputs))
                if output.sharer == len(captured.outputs):
                    output.sharer = None
            captured.outputs.append(output)

    def _guard(self, captured: Captured) -> None:
        """What must be as it was for the captured call to be used."""
        read = [self.outer[i] for i in self.read]
        given = {id(t): i for i, t in enumerate(self.arguments.tensors)}
        plain = [node.tensor for node in self.recorder.tape.starts(self.needed) if node.read is not None]
        hosts = [
            t
            for t in self.before.tensors.values()
            if type(t) is Tensor and t._host and any(t._host.plain is p for p in plain)
        ]
        containers = [edge.container for edge, _, _ in self.changes]
        without = [p for section in self.recorder.sections for p, grad in section.grads if grad is None]
        without += [t for t in self.recorder.without_grad if self.before.saw(t)]
        absent = [Edge("grad", tensor, None) for tensor in without]
        absent = [edge for edge in absent if edge.place not in self.before.edges]
        containers += [edge.container for edge in absent]
        used = [one for one in (*read, *plain, *hosts, *self.returned, *containers) if self.before.saw(one)]
        ways = {edge.place: (edge, child) for edge, child in self.before.ways(used)}
        ways.update({edge.place: (edge, None) for edge in absent})
        for edge, was, _ in self.changes:
            if isinstance(was, Tensor) and edge.place not in ways:
                ways[edge.place] = edge, ANY_TENSOR
            elif not isinstance(was, torch.Tensor):
                ways[edge.place] = edge, was
        written = {edge.place for edge, _, _ in self.changes}
        captured.guards = guards = Guards(list(ways.values()), self.before.modules, written)
        at = {edge.place: i for i, edge in enumerate(guards.edges)}
        guards.tie(list(ways.values()), given)
        leaves, moving, fixed = [], [], []
        for index, handle in zip(self.read, read, strict=True):
            if id(handle) in given:
                leaves.append((index, given[id(handle)]))
        for index, handle in zip(self.read, read, strict=True):
            if id(handle) not in given:
                edge = self._edge_of(handle)
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
        captured.specs = [self.specs[i] for i in order]
        captured.requires_grad = [self.outer[i].requires_grad for i in order]
        count = len(order)
        captured.sources = [[moved.get(s, s) if s < count else s for s in sources] for sources in captured.sources]
        captured.written = [moved[i] for i in captured.written]
        for number in self.recorder.reads:
            number.source = moved.get(number.source, number.source) if number.source < count else number.source
        self.pool = {value: moved.get(at, at) if at < count else at for value, at in self.pool.items()}
        captured.made = [(None if base is None else moved[base], group) for base, group in captured.made]
        for output in captured.outputs:
            output.base = None if output.base is None else moved[output.base]
        first: dict[int, int] = {}
        for number, index in enumerate(order):
            value = self.values[index].id
            if first.setdefault(value, number) != number:
                captured.twins.append((first[value], number))
        for edge, _, output in self.changes:
            captured.bindings.append(Binding(edge, output))
        held = {id(tensor) for tensor in (*read, *self.returned)}
        captured.released = [
            e for e, was, _ in self.changes if e.kind == "grad" and isinstance(was, Tensor) and id(was) not in held
        ]
        self.position = {index: moved[at] for index, at in self.position.items()}
        captured.rebound = [(self.position[index], output) for index, output in self.rebound]

    def _finish(self, captured: Captured, segments: list[Any]) -> None:
        recorder = self.recorder
        tape = recorder.tape
        again = {id(entry) for entry in tape.again()}
        puts = set(captured.puts)
        captured.variable = tape.variable
        captured.items = [
            item
            for item in recorder.items
            if (id(item) in again if type(item) is Entry else not isinstance(item, Put) or item.id in puts)
        ]
        captured.starts = tape.starts(self.needed)
        entries = [item for item in captured.items if type(item) is Entry]
        written = {storage for entry in entries for storage in entry.written}
        # An expanded view cannot be written, but what it is a view of can.
        captured.rewritten = [
            n for n in captured.starts if n.read is not None and n.storage in written and is_written_as_it_is(n.tensor)
        ]
        captured.generators = list({g: None for entry in entries for g in entry.generators})
        if any(type(item) is Key for item in captured.items) and torch.default_generator not in captured.generators:
            captured.generators.append(torch.default_generator)
        captured.numbers = list(recorder.numbers)
        captured.segments = segments
        controller = runtime.controller()
        captured.programs = [controller.define(segment.program) for segment in segments]
        captured.instructions = max(1, sum(len(segment.program.body) for segment in segments))
        captured.nbytes = sum(o.spec.local_nbytes for o in captured.outputs)

    def _stage(self, captured: Captured, counts: list[int]) -> None:
        """Cut what a call does where values are read. ``counts``: the programs up to each, and after the last."""
        stages = [Stage([], count) for count in counts]
        at = 0
        for item in captured.items:
            if type(item) is Read:
                stages[at].read = item
                at += 1
            else:
                stages[at].items.append(item)
        captured.stages = stages
        captured.items = [item for item in captured.items if type(item) is not Read]
        captured.reads = self.recorder.reads

    def _is_hidden(self, made: set[int]) -> bool:
        """Whether a value made in the function lives on where no later call would put its like."""
        seen = {handle._value.id for handle in self.handles}
        for handle in (*self.outer, *self.handles):
            seen |= {copy.id for copy, _ in (handle._value.kept or {}).values()}

        def alive() -> set[int]:
            controller = runtime.controller()
            with controller.lock:
                self._drain(controller)
            return made - self.recorder.freed - seen

        if not alive():
            return False
        gc.collect()
        left = alive()
        if not left:
            return False
        handles = [
            one for one in gc.get_objects() if type(one) is Tensor and one._value is not None and one._value.id in left
        ]
        # What only torch itself holds, as the base of a view, no Python code can come by.
        return any(
            not isinstance(holder, types.FrameType) and holder is not handles
            for handle in handles
            for holder in gc.get_referrers(handle)
        )

    def _drain(self, controller: Any) -> None:
        watch.recorders[-1] = self.recorder
        try:
            controller.drain()
        finally:
            del watch.recorders[-1]


def is_written_as_it_is(tensor: torch.Tensor) -> bool:
    """Whether each element has a place of its own, as far as strides of 0 tell."""
    return all(step or size < 2 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _memory(handle: Any) -> Any:
    return handle._host.plain if type(handle) is Tensor and handle._host is not None else None


def _renamed(command: Command, old: int, new: int) -> Command:
    if old not in command.inputs:
        return command
    inputs = [new if value == old else value for value in command.inputs]
    return Command(
        command.program, inputs, command.outputs, command.operands, command.name, command.line, command.varying
    )


def line_of(command: Command) -> str:
    """The user's line of a command."""
    return lines.text(command.line)
