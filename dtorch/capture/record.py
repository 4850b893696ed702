"""One call of a function, run as it is and recorded: what it returns, and the captured call that does the same again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..client import aliasing, host, runtime
from ..client.handles import wrap
from ..client.values import Value
from ..errors import ImplicitCommunication
from ..program.compose import Command, Segment, compose
from ..sharding.spec import mesh_id
from ..tensor import Tensor
from . import changes, passes
from .arguments import Arguments
from .asked import modes_asked
from .captured import Captured
from .changes import Given
from .gradients import Gradient, backward_of, differentiate
from .hidden import is_hidden
from .optimizers import settings_of
from .outer import Outer
from .outside import Outside, grad_of
from .parts import Call, Stage
from .plain import PLAIN, Entry
from .reads import Read
from .recorder import Key, Put, Recorder, copying
from .repeats import SentAgain, once
from .replay import Replay, joined
from .results import Bind, maker_of
from .wiring import Wiring


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
        backend: str | None = None,
        keeps_constants: bool = False,
    ) -> None:
        self.keeps_constants = keeps_constants
        self.name = name
        self.arguments = arguments
        self.roots = [function, *arguments.objects]
        self.before = Outside(self.roots)
        self.given = Given(args, kwargs)
        _refresh(arguments.tensors)
        self.recorder = recorder = Recorder(backend)
        self.outer = Outer(arguments.tensors, self.before)
        self._tell_of_outside()
        recorder.roots = self.outer.roots()
        torch.clear_autocast_cache()  # a cast that was made before is no part of this call
        grads = [grad_of(tensor) if tensor.is_leaf else None for tensor in self.arguments.tensors]
        modes = [module.training for module in self.before.modules]
        self.captured: Captured | None = None
        with modes_asked() as self.asked:
            with recorder, self._telling_of_backward():
                self.result = function(*args, **kwargs)
            for tensor, grad in zip(self.arguments.tensors, grads, strict=True):
                if tensor.is_leaf and grad_of(tensor) is not grad:
                    recorder.refuse(
                        "it changes the gradient of an argument: keep what gets gradients in a module or closure"
                    )
            torch.clear_autocast_cache()
            self.after = Outside(self.roots)
            if recorder.refused is None:
                self.captured = self._capture()
        if [module.training for module in self.before.modules] != modes:
            recorder.once("it changes the mode of a module: call train() and eval() outside")
        self.refused, self.passing = recorder.refused, recorder.passing
        if self.refused or self.passing:
            self.captured = None

    # -- before

    def _tell_of_outside(self) -> None:
        recorder = self.recorder
        if not self.before.is_complete:
            recorder.refuse("too many objects are in reach of the function")
        if any(isinstance(module, torch.jit.ScriptModule) for module in self.before.modules):
            recorder.refuse("a TorchScript module is in reach of the function, and what that holds cannot be seen")
        for index, tensor in enumerate(self.arguments.tensors):
            if type(tensor) is not Tensor:
                recorder.tape.outside(tensor, lambda call, i=index: call.tensors[i])
            elif tensor._spec is None:
                recorder.tape.outside(tensor._host.plain, lambda call, i=index: _memory(call.tensors[i]))
        for edge, child in self.before.edges.values():
            if not isinstance(child, torch.Tensor):
                continue
            if type(child) in PLAIN:
                recorder.tape.outside(child, lambda call, edge=edge: edge.get())
            elif type(child) is Tensor and child._spec is None:
                recorder.tape.outside(child._host.plain, lambda call, edge=edge: _memory(edge.get()))

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

    def _capture(self) -> Captured | None:
        recorder = self.recorder
        captured = Captured(self.name, self.arguments.objects)
        captured.checks_grad = recorder.with_grad
        made = {value for command in recorder.commands for value in command.outputs}
        self._find_outputs(captured, made)
        self.changes = changes.put(self.before, self.after, self._handle, recorder)
        self.changes += changes.taken_away(self.before, self.after, recorder)
        self.rebound = changes.rebound(self.outer, self._handle)
        self.given.refuse_changes(self.before, self.after, recorder)
        recorder.tape.settle()
        if self.outer.are_in_other_graphs():
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
        kept = {self.id_of(handle) for handle in self.handles} | {self.fresh.get(v, v) for v in read_later}
        pieces = self._composed(commands, kept & (made | set(self.fresh.values())))
        segments = [segment for piece in pieces for segment in piece]
        wiring = Wiring(self)  # no attribute: a cycle would keep what it has seen until garbage is collected
        wiring.find(captured, segments, read_later)
        if recorder.refused:
            return None
        wiring.guard(captured)
        self._finish(captured, segments)
        self._stage(captured, list(map(len, pieces)))
        if gradient is not None:
            gradient.inputs = [wiring.position[i] for i in gradient.inputs]
            gradient.backwards = [backward_of(b, self.name, wiring.pool, recorder) for b in backwards]
            if recorder.refused:
                return None
            captured.gradient = gradient
            self._attach(captured, wiring)
            read_later |= {value.id for value in self.outer.values}
        del backwards
        if is_hidden(made - read_later, [*self.outer.handles, *self.handles], recorder):
            recorder.refuse("a tensor made in the function is kept where dtorch.compile cannot see")
        captured.settle()
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
            pieces.append(compose(self.name, commands[start:end], wanted, passes.chosen(self.recorder.backend)))
            wanted = wanted.union(*[segment.inputs for segment in pieces[-1]])
        return pieces[::-1]

    def _differentiate(self) -> tuple[Gradient | None, list[Any]]:
        """How the results get gradients, if they do; and the backwards as recorded."""
        if any(handle.requires_grad and handle.grad_fn is None for handle in self.handles):
            self.recorder.refuse("it makes a leaf that requires gradients")
        if not any(handle.grad_fn is not None for handle in self.handles):
            return None, []
        if any(handle.retains_grad for handle in self.handles):
            self.recorder.refuse("it calls retain_grad on a tensor that outlives it")
            return None, []  # no backward is tried, which would add to what that tensor keeps
        used = {value for command in self.recorder.commands for value in command.inputs}
        read = {i for i, value in enumerate(self.outer.values) if value.id in used}
        try:
            outputs, inputs, found, reach = differentiate(self.handles, self.outer.handles, read, self.recorder)
        except ImplicitCommunication:  # which is raised by a backward, if there will be one
            self.recorder.refuse("its backward communicates, which set_implicit_communication('error') refuses")
            return None, []
        except (
            RuntimeError
        ) as error:  # the graph is used up, or its tensors were written: told when there is a backward
            outputs = [i for i, handle in enumerate(self.handles) if handle.grad_fn is not None]
            inputs = [i for i in sorted(read) if self.outer.handles[i].requires_grad]
            return Gradient(self.name, outputs, inputs, [set() for _ in outputs], [], str(error)), []
        return Gradient(self.name, outputs, inputs, reach, []), found

    def _attach(self, captured: Captured, wiring: Wiring) -> None:
        """Give the results of this call the node that those of later ones will have, and let go of its own graph."""
        call = Call(captured, self.arguments.tensors)
        order: list[Any] = [None] * len(wiring.read)
        for index in wiring.read:
            order[wiring.position[index]] = self.outer.handles[index]
        call.handles = order
        call.returned = self.returned
        call.values = {put.id: put.value for put in self.recorder.puts.values()}
        call.numbers = list(self.recorder.numbers)
        call.env = {node.index: node.tensor for node in self.needed}
        wanted = set(wiring.inner)
        found = {one.id: one for one in gc.get_objects() if type(one) is Value and one.id in wanted}
        found |= {copy: self.recorder.puts[put].value for put, copy in self.fresh.items()}
        values: Any = [found.get(value) for value in wiring.inner]  # those that backward reads are alive
        differentiable = set(captured.gradient.outputs)
        outputs = [wrap(h._spec, h._value) if i in differentiable else h for i, h in enumerate(self.handles)]
        call.handles = captured.gradient.attach(call, values, outputs)
        for edge, _, output in self.changes:
            if output in differentiable:
                edge.put(call.handles[output])
        self.result = captured.result(call.handles, call.tensors, call.returned, call.plain)
        self.handles = call.handles

    def _find_outputs(self, captured: Captured, made: set[int]) -> None:
        """The tensors of the result."""
        #: Handles that a call makes, each once.
        self.handles: list[Any] = []
        self.needed: list[Any] = []
        #: Tensors from outside that the call returns as they are.
        self.returned: list[Any] = []
        #: Arguments that it returns as they are. One that is also outside may have been meant as that.
        self.given_back: list[Any] = []
        before = {id(t): i for i, t in enumerate(self.arguments.tensors)}

        def of_tensor(tensor: torch.Tensor, bind: Bind) -> str:
            if id(tensor) in before:
                self.given_back.append(tensor)
                return f"tensors[{before[id(tensor)]}]"
            if type(tensor) is Tensor and tensor._spec is not None:
                if self.before.saw(tensor) and tensor._value.id not in made:
                    captured.returned.append(self.outer.edge_of(tensor))
                    self.returned.append(tensor)
                    return f"returned[{len(self.returned) - 1}]"
                return f"handles[{self._handle(tensor)}]"
            plain = tensor._host.plain if type(tensor) is Tensor else tensor
            if type(plain) not in PLAIN or (type(tensor) is Tensor and tensor._host.root.joined is not None):
                self.recorder.refuse(f"it returns a {type(tensor).__name__} that is not of the mesh")
                return bind(tensor)
            node = self.recorder.tape.node(plain)
            self.needed.append(node)
            as_it_was = host.make if type(tensor) is Tensor else lambda found: found

            def make(found: torch.Tensor) -> torch.Tensor:
                return as_it_was(found.clone() if node.storage not in captured.variable else found)

            return f"{bind(make)}(plain({bind(node)}))"

        captured.result = maker_of(self.result, of_tensor, self.before.saw, self.recorder.refuse)

    def _handle(self, tensor: Any) -> int:
        for index, handle in enumerate(self.handles):
            if handle is tensor:
                return index
        self.handles.append(tensor)
        return len(self.handles) - 1

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

    def id_of(self, handle: Any) -> int:
        """The number of what a handle refers to, in the composed programs."""
        return self.fresh.get(handle._value.id, handle._value.id)

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
        captured.items = once(captured.items, tape.variable)
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
        for stage in stages:
            stage.items = joined(stage.items)
        replayed = (Replay, Put, SentAgain, Key)
        captured.may_fail = bool(self.recorder.reads) or any(
            type(item) not in replayed for stage in stages for item in stage.items
        )
        captured.reads = self.recorder.reads


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


def _refresh(tensors: list[torch.Tensor]) -> None:
    """Bring views that were taken of redistributed copies up to date, so that it is no part of what is recorded (`Captured.refresh`)."""
    ours = [tensor for tensor in tensors if type(tensor) is Tensor and tensor._spec is not None]
    if any(tensor._value.copy is not None for tensor in ours):
        aliasing.tell(ours)
        controller = runtime.controller()
        with controller.lock:
            for tensor in ours:
                aliasing.refresh(controller, tensor._value)
