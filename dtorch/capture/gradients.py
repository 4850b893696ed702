"""The backward of a captured call: programs too, run by one autograd node that the results carry."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..client import fresh, host, inserted, redistribute, runtime
from ..client.handles import wrap
from ..client.random_ops import draw_key
from ..client.values import Value, new_value
from ..interrupts import critical
from ..placement import settled
from ..program.compose import Segment, compose
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import passes
from .graphs import depend, reached, without_hooks
from .recorder import Recorder

#: How many of the results, from the first on, have a backward for each alone.
ALONE = 3


@dataclasses.dataclass(slots=True)
class Backward:
    """The gradients of the inputs, given those of some of the results.

    ``given``: the positions of these results among the differentiable ones; ``specs``: of their gradients. ``sources``: of each segment,
    where its inputs are: in the forward's values, then the given gradients, then constants, then values made by earlier segments.
    ``numbers``: of the forward's, or None for a key to draw. ``results``: for each input of the forward the spec of its gradient and which
    value made here it is, or None.
    """

    given: tuple[int, ...]
    specs: list[Spec]
    segments: list[Segment]
    programs: list[int]
    sources: list[list[int]]
    constants: list[Value]
    numbers: list[int | None]
    results: list[tuple[Spec, int] | None]
    #: The forward's values that it reads.
    saved: set[int]
    #: What it moves that nobody asks for.
    told: list[inserted.Told]


@dataclasses.dataclass(slots=True)
class Gradient:
    """How the results of a captured call get gradients.

    ``outputs``: the outputs that are differentiable; ``inputs``: the handles that want gradients; ``reach``: for each of the outputs, the
    inputs that it depends on, by position. Without ``backwards``, why there is none is ``error``.
    """

    name: str
    outputs: list[int]
    inputs: list[int]
    reach: list[set[int]]
    backwards: list[Backward]
    error: str = ""

    def attach(self, call: Any, values: list[Value], outputs: list[Any]) -> list[Any]:
        """The outputs, those that are differentiable with this call's node."""
        captured = call.captured
        pool = [handle._value for handle in call.handles]
        pool += captured.constants
        pool += [call.values[put] for put in captured.puts]
        pool += values
        saved = {index: pool[index] for backward in self.backwards for index in backward.saved}
        given = [call.handles[i] for i in self.inputs]
        state = _State(self, saved, list(call.numbers), [outputs[i] for i in self.outputs])
        made = _Node.apply(state, *given)
        found = list(outputs)
        for index, handle in zip(self.outputs, made if isinstance(made, tuple) else (made,), strict=True):
            found[index] = handle
        return found


class _State:
    """What one call leaves for its backward. ``saved`` are values by their place in the forward's pool."""

    __slots__ = ("gradient", "saved", "generations", "numbers", "outputs", "specs")

    def __init__(self, gradient: Gradient, saved: dict[int, Value], numbers: list[Any], outputs: list[Any]) -> None:
        self.gradient = gradient
        self.saved = saved
        self.generations = {index: value.root.generation for index, value in saved.items()}
        self.numbers = numbers
        self.outputs = outputs
        self.specs = [output._spec for output in outputs]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: _State, *inputs: Any) -> Any:
        ctx.set_materialize_grads(False)
        # What is saved hangs on a saved tensor: it goes when the graph is freed, and torch says in its own words that it is gone.
        saved: Any = torch.empty(0)
        saved.state = state
        ctx.save_for_backward(saved)
        outputs, state.outputs = state.outputs, []
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        state = ctx.saved_tensors[0].state
        with torch.no_grad():
            found = _run(state, grads)
        if torch.is_grad_enabled():  # with create_graph: they must not pass for constants
            name = state.gradient.name
            found = [None if grad is None else _Once.apply(name, grad.detach().requires_grad_()) for grad in found]
        return (None, *found)


class _Once(torch.autograd.Function):
    """A gradient that cannot be differentiated again, and says so where it is."""

    @staticmethod
    def forward(ctx: Any, name: str, grad: Any) -> Any:
        ctx.name = name
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"the gradient of {ctx.name}, which dtorch.compile captured, cannot be differentiated again: call the function "
            "without dtorch.compile where create_graph is needed"
        )


def _run(state: _State, grads: Sequence[Any]) -> list[Any]:
    gradient = state.gradient
    if not gradient.backwards:
        raise RuntimeError(gradient.error)
    for index, value in state.saved.items():
        if value.root.generation != state.generations[index]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, after "
                f"{gradient.name}, which dtorch.compile captured, and before its backward"
            )
    defined = {i for i, grad in enumerate(grads) if grad is not None}
    ways = {backward.given: backward for backward in gradient.backwards}
    exact = ways.get(tuple(sorted(defined)))
    if exact is not None:
        _tell([exact], grads, gradient.name)
        return _one(exact, state, grads, defined)
    alone = [ways.get((i,)) for i in sorted(defined)]
    if defined and all(alone):  # a gradient is linear in those of the results
        chosen = [way for way in alone if way is not None]
        _tell(chosen, grads, gradient.name)
        return _total([_one(way, state, grads, set(way.given)) for way in chosen])
    # Zeros stand for the others: right unless they meet an infinity.
    backward = min((b for b in gradient.backwards if defined <= set(b.given)), key=lambda b: len(b.given))
    _tell([backward], grads, gradient.name)
    found = _one(backward, state, grads, defined)
    if any(grad is not None and bool(grad.isnan().any()) for grad in found):
        raise RuntimeError(
            f"the backward of {gradient.name}, which dtorch.compile captured, was given gradients of some of its results only, and "
            "makes NaN of zeros for the others: return fewer results, or put those that get gradients first"
        )
    return found


def _tell(backwards: list[Backward], grads: Sequence[Any], name: str) -> None:
    """Tell what they move that nobody asks for, as it was told when they were recorded, and what brings the gradients that are given."""
    if inserted.mode == "allow":
        return
    for backward in backwards:
        for index, goal in zip(backward.given, backward.specs, strict=True):
            spec = getattr(grads[index], "_spec", None)
            if spec is not None and (spec.mesh is not goal.mesh or spec.placements != goal.placements):
                inserted.tell(f"backward of {name}", [spec], [(spec, goal)], False, None)
        for told in backward.told:
            inserted.tell(*told)


def _total(found: list[list[Any]]) -> list[Any]:
    """The sums of several gradients of each input, None where there is none."""
    totals = []
    for grads in zip(*found, strict=True):
        defined = [grad for grad in grads if grad is not None]
        totals.append(functools.reduce(torch.add, defined) if defined else None)
    return totals


def _one(backward: Backward, state: _State, grads: Sequence[Any], defined: set[int]) -> list[Any]:
    """The gradients of the inputs by one recorded backward."""
    gradient = state.gradient
    given = [
        fresh.filled(spec, 0) if grads[i] is None else _brought(grads[i], spec, gradient.name)
        for i, spec in zip(backward.given, backward.specs, strict=True)
    ]
    numbers = [draw_key() if number is None else state.numbers[number] for number in backward.numbers]
    values = _issue(backward, state, given, numbers, gradient.name)
    reached = set().union(*(gradient.reach[i] for i in defined))
    return [
        None if result is None or at not in reached else wrap(result[0], values[result[1]])
        for at, result in enumerate(backward.results)
    ]


@critical
def _issue(backward: Backward, state: _State, given: list[Any], numbers: list[Any], name: str) -> list[Value]:
    controller = runtime.controller()
    ids: dict[int, int] = {index: value.id for index, value in state.saved.items()}
    start = -1  # what is not the forward's is counted down from there
    for one in (*[g._value for g in given], *backward.constants):
        ids[start] = one.id
        start -= 1
    values = [new_value() for segment in backward.segments for _ in segment.outputs]
    for value in values:
        ids[start] = value.id
        start -= 1
    made = iter(values)
    with controller.lock:
        for program, sources, segment in zip(backward.programs, backward.sources, backward.segments, strict=True):
            outputs = [next(made).id for _ in segment.outputs]
            chosen = [numbers[i] for i in segment.numbers]
            controller.issue([program, *[ids[s] for s in sources], *outputs, *chosen], f"backward of {name}", 5)
    return values


def _brought(grad: Any, spec: Spec, name: str) -> Any:
    """A gradient as the program takes it."""
    if type(grad) is not Tensor or grad._spec is None:
        plain = grad._host.plain if type(grad) is Tensor else grad
        return host.from_plain(plain.contiguous(), spec.mesh, spec.placements)
    if grad._spec is not spec:
        with torch.no_grad():
            if grad._spec.placements != spec.placements or grad._spec.mesh is not spec.mesh:
                own = grad._spec
                goal = Spec.of(spec.mesh, spec.placements, own.shape, own.stride, own.dtype)
                grad = redistribute.move(grad, goal, f"backward of {name}")
            if grad.stride() != spec.stride:
                grad = grad.contiguous()
    return grad


def differentiate(
    handles: list[Any],
    outer: list[Any],
    read: set[int],
    forward: Recorder,
) -> tuple[list[int], list[int], list[Any], list[set[int]]]:
    """Run the backward of a recorded call, for each way of using its results, and record it.

    Args:
        handles: the outputs of the call.
        outer: the handles from outside.
        read: the indices of those that the call has read.

    Returns:
        The indices of the differentiable outputs and of the inputs that want gradients, the recorded backwards, and `Gradient.reach`.
        The backwards are empty where the graph is used up.
    """
    outputs = [i for i, h in enumerate(handles) if h.requires_grad and h.grad_fn is not None]
    inputs = [i for i in sorted(read) if outer[i].requires_grad]
    targets = [outer[i] for i in inputs]
    if depend(targets):
        forward.refuse(
            "it reads a tensor that gets gradients and another that was computed from it outside: compute that one inside, or detach it"
        )
        return outputs, inputs, [], [set() for _ in outputs]
    reach = reached([handles[i] for i in outputs], targets)
    ways = [tuple(range(len(outputs)))]
    scalars = tuple(i for i, output in enumerate(outputs) if handles[output].ndim == 0)
    if scalars and len(scalars) < len(outputs):
        ways.append(scalars)
    ways += [(i,) for i in range(min(len(outputs), ALONE)) if (i,) not in ways]
    found = []
    for way in ways:
        specs = [_gradient_spec(handles[outputs[i]]._spec) for i in way]
        given = [fresh.filled(spec, 1) for spec in specs]
        recorder = Recorder(forward.backend, forward)
        with without_hooks(targets), recorder:
            grads = list(
                torch.autograd.grad(
                    [handles[outputs[i]] for i in way], targets, given, retain_graph=True, allow_unused=True
                )
            )
            roots: set[int] = set()
            with torch.no_grad():
                for i, grad in enumerate(grads):
                    if grad is None:
                        continue
                    if type(grad) is not Tensor or grad._spec is None:
                        recorder.refuse("a gradient is not on the mesh")
                        continue
                    if grad._value.root.born < recorder.floor or id(grad._value.root) in roots:
                        grads[i] = grad = grad.clone()  # of its own memory: torch adds to it in place
                    roots.add(id(grad._value.root))
        if recorder.refused is not None:
            forward.refuse(recorder.refused)
        found.append((way, specs, given, recorder, grads))
    return outputs, inputs, found, reach


def backward_of(recorded: Any, name: str, position: dict[int, int], forward: Recorder) -> Backward:
    """The `Backward` of what `differentiate` recorded. ``position``: where a value of the forward is in its pool."""
    way, specs, given, recorder, grads = recorded
    made = {value for command in recorder.commands for value in command.outputs}
    kept = {grad._value.id for grad in grads if grad is not None} & made
    segments = compose(f"backward of {name}", recorder.commands, kept, passes.chosen(recorder.backend))
    inner = [value for segment in segments for value in segment.outputs]
    sources: dict[int, int] = {}
    start = -1
    for grad in given:
        sources[grad._value.id] = start
        start -= 1
    constants = []
    recorder.tape.settle()
    for put in recorder.puts.values():
        if put.node.storage in recorder.tape.variable or put.value.root.generation:
            forward.refuse("its backward works on plain tensors that differ from call to call")
        constants.append(put.value)
        sources[put.id] = start
        start -= 1
    for value in inner:
        sources[value] = start
        start -= 1
    saved: set[int] = set()
    for segment in segments:
        for value in segment.inputs:
            if value not in sources:
                if value not in position:
                    forward.refuse("its backward reads a tensor from where dtorch.compile cannot see")
                    continue
                sources[value] = position[value]
            if sources[value] >= 0:
                saved.add(sources[value])
    place = {value: i for i, value in enumerate(inner)}
    results = [None if g is None else (g._spec, place.get(g._value.id, -1)) for g in grads]
    controller = runtime.controller()
    with controller.lock:
        programs = [controller.define(segment.program) for segment in segments]
    return Backward(
        way,
        specs,
        segments,
        programs,
        [[sources.get(v, 0) for v in segment.inputs] for segment in segments],
        constants,
        [forward.keys.get(number) for number in recorder.numbers],
        results,
        saved,
        recorder.told,
    )


def _gradient_spec(spec: Spec) -> Spec:
    return Spec.of(spec.mesh, settled(spec.placements), spec.shape, None, spec.dtype)
