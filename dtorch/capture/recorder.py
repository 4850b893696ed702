"""What one call of a function issues: its commands, its random keys, its plain work, and why it cannot be captured if it cannot."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from threading import get_ident
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..client import inserted, lines, runtime, torch_internals, values_out, watch
from ..client.controller import Controller
from ..client.handles import tensors_in
from ..client.random_ops import draw_key
from ..client.values import Root, Value, new_value, next_value_id
from ..engine import protocol
from ..program.compose import Command
from ..program.ir import Op, Program, Slot
from ..sharding.spec import Spec, mesh_id
from .plain import PLAIN, UNSEEN, Node, Tape
from .reads import Read, decides

_READS = {
    protocol.GET: "a value is read",
    protocol.DESCRIBE: "a shape depends on values",
    protocol.SHARDS: "values are read",
}

#: Functions that read a plain tensor's values past the dispatcher.
_LOOKS = {
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr, torch.Tensor.untyped_storage,
    torch.Tensor.__reduce_ex__, torch.Tensor.apply_, torch.Tensor.map_,
}  # fmt: skip


_GET_GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined]


def copying(mesh: int) -> Program:
    """One value copied."""
    return Program("copy", mesh, 1, 0, [Op("aten.clone.default", [Slot(0)], {}, [1])], [1])


@dataclasses.dataclass(slots=True)
class Key:
    """A random key is drawn: number ``number`` of the call."""

    number: int

    def run(self, call: Any) -> None:
        call.numbers[self.number] = draw_key()


@dataclasses.dataclass(slots=True)
class Put:
    """A plain tensor goes to the workers, as the value that was ``id`` when this was recorded; ``spare`` is a copy of that."""

    node: Node
    spec: Spec
    id: int
    value: Value
    spare: Value

    def run(self, call: Any) -> None:
        call.values[self.id] = runtime.controller().put(call.plain(self.node), self.spec, alone=False)


class Recorder:
    """Takes the commands of this thread while it is entered.

    Args:
        backend: what the workers are to run the program with (`dtorch.capture.passes`).
        forward: the recorder of the call whose backward this is.
    """

    def __init__(self, backend: str | None, forward: Recorder | None = None) -> None:
        self.backend = backend
        self._forward_recorder = forward
        self.controller: Controller = runtime.controller()
        #: Values from here on are made while recording.
        self.floor = next_value_id()
        #: Values from here on are made by the call, of which this may be the backward.
        self.first: int = self.floor if forward is None else forward.first
        self.commands: list[Command] = []
        self.freed: set[int] = set()
        #: Random keys, each with its number.
        self.keys: dict[int, int] = {}
        #: Numbers of the call that differ from run to run, as they were.
        self.numbers: list[Any] = []
        self.tape = Tape(self.refuse)
        #: What every call does on the client, in order.
        self.items: list[Any] = []
        self.puts: dict[int, Put] = {}
        #: What was told of moves that nobody asks for.
        self.told: list[inserted.Told] = []
        self.refused: str | None = None
        #: Why the call after this one will not do the same, though it may well be captured.
        self.passing: str | None = None
        #: Autograd was on for some op.
        self.with_grad = torch.is_grad_enabled()
        #: Tensors that were asked for their gradients, and had none.
        self.without_grad: list[torch.Tensor] = []
        self.section: Any = None
        self.sections: list[Any] = []
        self._programs: dict[int, Program] = {}
        self._forward: OrderedDict[int, Any] = OrderedDict()
        self._mode = _Functions(self)
        self._pauses = False
        #: Numbers that Python has read.
        self.reads: list[Read] = []
        #: The roots of tensors outside, with their generations before the call.
        self.roots: list[tuple[Root, int]] = []
        self._reads = False

    def __enter__(self) -> Recorder:  # noqa: PYI034 - typing has no Self in Python 3.10
        watch.recorders[get_ident()] = self
        self._random_state = torch.get_rng_state()
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)
        if not torch.equal(self._random_state, torch.get_rng_state()):
            self.refuse("the random state is set, or drawn from unseen, in the function")
        with self.controller.lock:
            self.controller.drain()
            del watch.recorders[get_ident()]

    def refuse(self, reason: str) -> None:
        """It cannot be captured; the first reason counts."""
        if self.refused is None:
            line = lines.here()
            self.refused = reason if not line or ", at " in reason else f"{reason}, at {line}"

    def once(self, reason: str) -> None:
        """This call's recording is of no use to a later one, but the next call's may be."""
        if self.passing is None:
            self.passing = reason

    # -- what the client tells

    def take(self, controller: Controller, command: list, name: str | None, sequence: int) -> None:
        """A command of this thread; the caller holds the controller's lock."""
        kind = command[0]
        if self._pauses:
            return
        if kind < protocol.FIRST_PROGRAM:
            if kind == protocol.FREE:
                self.freed.update(command[1:])
            elif kind in _READS and not self._reads:
                self.refuse(_READS[kind])
            elif kind == protocol.DEFAULT_DTYPE:
                self.refuse("the default dtype is changed")
            return
        self.with_grad = self.with_grad or torch.is_grad_enabled()
        program = self._programs.get(kind)
        if program is None:
            body = controller.program_bodies[kind - protocol.FIRST_PROGRAM][1]
            program = self._programs[kind] = msgspec.msgpack.decode(body, type=Program)
        first, last = 1 + program.inputs, 1 + program.inputs + len(program.outputs)
        recorded = Command(program, command[1:first], command[first:last], command[last:], name or program.name)
        recorded.line = self._line(controller, sequence) if name is not None else None
        for index, value in enumerate(recorded.operands):
            if type(value) is int and value in self.keys:
                recorded.varying[index] = self.keys[value]
        self.commands.append(recorded)

    def _line(self, controller: Controller, sequence: int) -> Any:
        """Who issued it, as (code, instruction); for an op of backward, who issued the forward op."""
        line = controller.history.where(sequence)
        forward = torch_internals.forward_of_backward()
        if forward is not None:
            return self._forward.get(forward, line)
        self._forward[torch_internals.last_autograd_node()] = line
        return line

    def read(self, tensor: Any) -> Any:
        """Python reads the only number of a tensor."""
        if tensor._spec is None:
            if tensor._host.root.joined is not None:
                self.refuse(_READS[protocol.GET])
            return self.plain_op(torch.Tensor.item, (tensor._host.plain,), {})
        tensor = values_out.readable(tensor)
        self._reads = True
        try:
            found = tensor.to_torch().item()
        finally:
            self._reads = False
        read = Read(tensor._value.id, tensor._spec, found, len(self.commands), lines.here())
        if self._forward_recorder is not None or self.section is not None or not decides(found):
            self.refuse(_READS[protocol.GET])
        elif any(root.generation != generation for root, generation in self.roots):
            self.refuse("a value is read after something outside has been written in place")
        self.reads.append(read)
        self.items.append(read)
        return found

    def drawn(self, before: torch.Tensor) -> None:
        """Random numbers were drawn, from the state ``before`` on: a later call draws them from where the last ones ended."""
        if not torch.equal(before, self._random_state):
            self.refuse("the random state is set in the function")
        self._random_state = torch.get_rng_state()

    def key(self, key: int, before: torch.Tensor) -> None:
        """A random key was drawn. (Checkpointing draws the same ones again, from a state that it has kept.)"""
        if key not in self.keys and (self._forward_recorder is None or key not in self._forward_recorder.keys):
            self.drawn(before)
        if key not in self.keys:
            self.keys[key] = self.number(key)
            self.items.append(Key(self.keys[key]))

    def number(self, value: Any) -> int:
        """The index of one more number that differs from call to call."""
        self.numbers.append(value)
        return len(self.numbers) - 1

    def put(self, tensor: torch.Tensor, value: Value, spec: Spec) -> None:
        """A plain tensor was sent."""
        owner = self
        if not self.tape.is_known(tensor):
            if self._forward_recorder is not None and self._forward_recorder.tape.is_known(tensor):
                owner = self._forward_recorder
            elif tensor.ndim:  # composites of torch's make 0-d tensors of their numbers, as ``x[0] = 1`` does
                self.refuse(UNSEEN)
        controller = self.controller
        with controller.lock:
            program = controller.define(copying(mesh_id(spec.mesh)))
            spare = new_value()
            self._pauses = True  # no part of what is recorded
            controller.issue([program, value.id, spare.id])
            self._pauses = False
        put = owner.puts[value.id] = Put(owner.tape.node(tensor), spec, value.id, value, spare)
        owner.items.append(put)

    def uncommitted(self, plain: torch.Tensor) -> None:
        """An uncommitted tensor was made over ``plain``."""
        if not self.tape.is_known(plain):
            self.tape.fresh(plain)

    def factory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function that takes no tensor; what it makes may be one of ours."""
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        if has_array([*args, *kwargs.values()]):
            self.refuse("it makes a tensor of a numpy array")
        if self.section is None and is_plain(result):
            draws = not torch.equal(state, torch.get_rng_state())
            self.tape.made(func, args, kwargs, result, draws)
            self.items.append(self.tape.entries[-1])
            if draws:
                self.drawn(state)
        return result

    def plain_op(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op among plain tensors."""
        before = len(self.tape.entries)
        if self.section is not None:  # an optimizer's own, which runs as it is in every call
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        result = self.tape.run(func, args, kwargs, lines.here())
        self.items += self.tape.entries[before:]
        if any(torch.default_generator in entry.generators for entry in self.tape.entries[before:]):
            self.drawn(state)
        return result


class _Functions(TorchFunctionMode):
    """Sees calls of torch's functions before dispatch: those that read plain memory, and those of an optimizer's step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.section is not None:
            return recorder.section.call(func, args, kwargs)
        tensors = tensors_in([*args, *kwargs.values()])
        if func == _GET_GRAD and func(*args) is None:
            recorder.without_grad.append(args[0])
        if not all(map(is_plain, tensors)):
            return func(*args, **kwargs)
        if func in _LOOKS:
            recorder.tape.looked_at(tensors[0], f"a plain tensor's values are read at {lines.here()}")
            return func(*args, **kwargs)
        if func.__name__ == "__set__":
            recorder.refuse("an attribute of a plain tensor is set")
        if func.__name__ == "__get__" and not isinstance(func(*args), torch.Tensor):
            return func(*args)
        if tensors:
            return recorder.plain_op(func, args, kwargs)
        return recorder.factory(func, args, kwargs)


def is_plain(value: Any) -> bool:
    """Whether it is a tensor with memory of its own: none of ours, nor one that ``torch.func`` has wrapped."""
    return type(value) in PLAIN and torch_internals.innermost(value) is value


def has_array(value: Any) -> bool:
    """Whether there is a numpy array in nested lists."""
    return isinstance(value, np.ndarray) or (isinstance(value, (list, tuple)) and any(map(has_array, value)))
