"""Keeping views and their bases the same where the workers' own memory does not (see `values`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from ..engine import protocol
from ..interrupts import critical
from ..program.ir import Local, Operand, Slot
from ..sharding import expanded
from ..sharding.builder import Builder
from ..sharding.plan import Plan, plan_op, write_op
from ..sharding.schema import OpInfo
from ..sharding.spec import Spec
from ..sharding.strategy import TensorArg
from ..tensor import Tensor
from . import inserted
from .controller import Controller
from .values import OLDEST, Copy, Root, Value, next_value_id

aten = torch.ops.aten


def view_value(
    number: int, spec: Spec, plan: Plan, output: int, info: OpInfo, base: Any, args: Any, kwargs: dict[str, Any]
) -> Value:
    """The value of a view of ``base``."""
    value = base._value
    if not plan.detached:
        return Value(number, root_of(base), value.copy, value if value.copy is not None else None)
    metas, named = _constants(args), {k: _constants(v) for k, v in kwargs.items()}
    return Value(number, root_of(base), Copy(number, spec, value, base._spec, info, metas, named, output))


def root_of(base: Any) -> Root:
    """The root of a tensor that is viewed. (A view is a handle of its own, of which nothing tells that it is of a parameter.)"""
    root = base._value._root or base._value.root
    if base._is_param:
        root.born = OLDEST
    return root


def _constants(value: Any) -> Any:
    """A view op's arguments with a `TensorArg` in place of its one tensor."""
    if isinstance(value, torch.Tensor):
        spec = value._spec  # type: ignore[attr-defined]
        return TensorArg(0, tuple(spec.shape), spec.stride, spec.dtype)
    if isinstance(value, (list, tuple)):
        return tuple([_constants(item) for item in value])
    return value


def tell(tensors: Sequence[Tensor], writes: Sequence[int] = ()) -> None:
    """An op is about to use placed tensors: tell what `refresh` will move, and `written` for those in ``writes``."""
    if inserted.mode == "allow":
        return
    for index, tensor in enumerate(tensors):
        copy = tensor._value.copy
        while copy is not None:
            plan = plan_op(copy.info, copy.args, copy.kwargs, [copy.parent_spec])
            moves = list(plan.moves) if copy.generation != copy.parent.root.generation else []
            if index in writes and _written_slice(copy, plan) is None:
                there = copy.parent_spec.with_placements(plan.decision.inputs[0])
                moves += [(copy.parent_spec, there), (there, copy.parent_spec)]
            if moves:
                inserted.tell(copy.info.name, [copy.parent_spec], moves, plan.decision.gathered, plan.call)
            copy = copy.parent.copy


@critical
def refresh(controller: Controller, value: Value) -> None:
    """Make the copy whose memory ``value`` is agree with its parent. The caller holds the lock."""
    copy = value.copy
    if copy is None or copy.generation == value.root.generation:
        return
    parent = copy.parent
    refresh(controller, parent)
    plan = plan_op(copy.info, copy.args, copy.kwargs, [copy.parent_spec])
    program = controller.define(plan.program)
    outputs = [next_value_id() for _ in plan.program.outputs]
    numbers = _numbers(copy)
    controller.issue([program, parent.id, *outputs, *numbers, *plan.operands], copy.info.name)
    taken = outputs[copy.output]
    assign = controller.define(_assignment(copy.spec))
    controller.issue([assign, copy.id, taken], copy.info.name)
    controller.issue([protocol.FREE, *outputs])
    copy.generation = value.root.generation


def written(controller: Controller, value: Value) -> None:
    """``value`` has just been written: mark its aliases stale, and bring the write to its base. The caller holds the lock."""
    root = value.root
    root.generation += 1
    copy = value.copy
    brought: list[int] = []
    while copy is not None:
        copy.generation = root.generation
        brought.append(copy.id)
        _write_back(controller, copy, brought)
        copy = copy.parent.copy


def _write_back(controller: Controller, copy: Copy, brought: list[int]) -> None:
    """Write the copy's memory to the part of its parent that it views.

    If that fails nothing that should have agreed may be read: not ``brought`` either, this copy and those that it was written from.
    """
    plan = plan_op(copy.info, copy.args, copy.kwargs, [copy.parent_spec])
    numbers = _numbers(copy)
    builder = Builder(copy.parent_spec.mesh, 1 + len(brought), len(numbers))
    own = len(brought)
    slice_of = _written_slice(copy, plan)
    if slice_of is not None:
        _write_slice(builder, own, copy, slice_of)
    else:
        _write_view(builder, own, copy, plan)
    builder.body.append(Local("dtorch.agreed", [[Slot(1 + i) for i in range(len(brought))]], {}, []))
    program = controller.define(builder.program(f"write back {copy.info.name}", []))
    controller.issue([program, copy.parent.id, *brought, *numbers, *builder.operands], copy.info.name)


def _write_view(builder: Builder, own: int, copy: Copy, plan: Plan) -> None:
    """Take the view of a redistributed copy of the parent, write that, and bring it back."""
    spec = copy.parent_spec
    there = spec.with_placements(plan.decision.inputs[0])
    whole = expanded.reshard(builder, 0, spec, there)
    outs = write_op(builder, copy.info, plan.call, plan.decision, [whole], copy.info.name)
    expanded.assign(builder, outs[copy.output], own, copy.spec)
    back = expanded.reshard(builder, whole, there, spec)
    expanded.assign(builder, 0, back, spec)


def _write_slice(builder: Builder, own: int, copy: Copy, slice_of: tuple[int, int, int, int, bool]) -> None:
    """Each device writes what falls into its own part of the sliced dim: nothing moves."""
    dim, start, stop, step, squeezed = slice_of
    source = own
    if squeezed:
        source = builder.slot()
        builder.op("aten.unsqueeze.default", [Slot(own), dim], [source])
    operands: list[Operand] = [builder.operand(n) for n in (start, stop, step)]
    spec = copy.parent_spec
    target, source = expanded.once(builder, 0, spec), expanded.once(builder, source, spec)
    builder.body.append(
        Local(
            "dtorch.slice_write",
            [Slot(target), Slot(source), dim, *operands],
            {},
            [],
            [builder.layout(spec.placements, tuple(spec.shape))],
        )
    )


def _written_slice(copy: Copy, plan: Plan) -> tuple[int, int, int, int, bool] | None:
    """The slice as which a write through the copy reaches its parent without communication; None where it does not."""
    found = _as_slice(copy)
    if found is None or not _only_unsharded(plan, copy, found[0]) or found[0] in expanded.repeated(copy.parent_spec):
        return None
    return found


def _as_slice(copy: Copy) -> tuple[int, int, int, int, bool] | None:
    """(dim, start, stop, step, whether the dim is gone) of a slice or select; None for another view."""
    op = copy.info.op
    shape = copy.parent_spec.shape
    values = {a.name: copy.info.value_of(a, copy.args, copy.kwargs) for a in copy.info.arguments}
    if op is aten.select.int:
        dim = values["dim"] % len(shape)
        index = values["index"] % shape[dim]
        return dim, index, index + 1, 1, True
    if op is aten.slice.Tensor:
        dim = (values["dim"] or 0) % len(shape)
        start, stop, step = slice(values["start"], values["end"], values["step"] or 1).indices(shape[dim])
        return dim, start, max(start, stop), step, False
    return None


def _only_unsharded(plan: Plan, copy: Copy, dim: int) -> bool:
    """Whether all the view needed was its dim whole: then the devices agree on everything else."""
    before, after = copy.parent_spec.placements, plan.decision.inputs[0]
    return all(
        a is b or (a.is_shard() and a.dim == dim and b.is_replicate()) for a, b in zip(before, after, strict=True)
    )


def _assignment(spec: Spec) -> Any:
    builder = Builder(spec.mesh, 2, 0)
    expanded.assign(builder, 0, 1, spec)
    return builder.program("refresh a view", [])


def _numbers(copy: Copy) -> list[Any]:
    """The numbers among a view op's arguments, which a run's command carries."""
    found: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif value is not None and type(value) is not complex and not isinstance(value, TensorArg):
            found.append(value)

    for argument in copy.info.arguments:
        if argument.is_number:
            visit(copy.info.value_of(argument, copy.args, copy.kwargs))
    return found


def interfere(plan: Plan, tensors: Sequence[Tensor]) -> bool:
    """Whether an op that writes several tensors writes memory that another of its tensors has too, and not where the workers see it.

    They see it where every tensor is run on as it is: then they run torch's op on aliases, as torch does.
    """
    if not plan.moves and all(tensor._value.copy is None for tensor in tensors):
        return False
    held = Counter(tensor._value.root for tensor in tensors)
    return len(held) < len(tensors) and any(held[tensors[i]._value.root] > 1 for i in plan.writes)
