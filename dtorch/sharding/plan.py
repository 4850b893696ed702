"""From one call of an op on placed tensors to the program that runs it.

The whole of planning: infer the outputs, choose placements, write the program. Pure: a plan depends on the op, the specs, the
constants and of each number its type and whether it `enlarges`, and the client keeps it under exactly that key.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import errors
from ..mesh import DeviceMesh
from ..placement import REPLICATE, PlacementList, is_partial
from ..program.ir import Local, Op, Program, Slot
from . import checks, expanded, shapes
from .builder import ArgWriter, Builder
from .choose import Decision, Weighed, choose
from .layout import stride_order
from .schema import OpInfo
from .spec import Spec
from .strategy import Call, TensorArg

aten = torch.ops.aten


@dataclasses.dataclass(slots=True)
class Choice:
    """Where an op will run on tensors of given shapes: all of a plan but the program, which is not written until it is needed.

    ``moves`` are the redistributions that tensors of given specs need for it; ``writes`` the inputs that are written.
    """

    info: OpInfo
    call: Call
    decision: Decision
    writes: tuple[int, ...]
    mesh: DeviceMesh
    moves: tuple[tuple[Spec, Spec], ...]
    #: The program for just these specs, once somebody wants it.
    plan: Plan | None = None
    #: What who runs it keeps of it.
    kept: Any = None
    is_simple = are_fresh = is_inplace = is_view = is_direct = False

    def at(self, specs: Sequence[Spec]) -> Choice:
        """The same choice for the same tensors under other placements."""
        return dataclasses.replace(self, moves=_moves(self.decision, specs), plan=None, kept=None)

    @property
    def makes_fresh(self) -> bool:
        """Nothing is written, and no output is a view of an input."""
        if self.writes:
            return False
        return all(
            self.info.alias_of(i, self.call.args, self.call.kwargs) is None for i in range(len(self.call.outputs))
        )


@dataclasses.dataclass
class Plan:
    """How to run one op on tensors of given specs, and what comes out.

    ``operands`` follow the call's numbers in a run's command. ``outputs`` has a spec for each tensor the program returns.
    ``aliases[i]`` is the input that output ``i`` is a view of, or None. ``detached``: the view was taken of a redistributed copy, so
    it aliases its base only in meaning. ``writes`` are the inputs that are written; ``moves`` the redistributions inserted.
    """

    program: Program
    operands: list[Any]
    outputs: tuple[Spec | None, ...]
    structure: str
    aliases: tuple[int | None, ...]
    detached: bool
    writes: tuple[int, ...]
    decision: Decision
    moves: tuple[tuple[Spec, Spec], ...]
    mesh: DeviceMesh
    call: Call | None = None
    program_id: int = 0
    nbytes: int = 0
    #: Shapes of tensors are among the operands.
    names_shapes: bool = False
    #: One fresh result, nothing written, nothing moved.
    is_simple: bool = dataclasses.field(init=False)
    #: Several fresh results, nothing written, nothing moved.
    are_fresh: bool = dataclasses.field(init=False)
    #: One tensor written, and returned, nothing moved.
    is_inplace: bool = dataclasses.field(init=False)
    #: Nothing moved or completed, and one tensor written at most.
    is_direct: bool = dataclasses.field(init=False)
    #: One view, and each device views what it has of the base.
    is_view: bool = dataclasses.field(init=False)
    #: A view of all elements of its base, which is not replicated.
    is_whole_view: bool = dataclasses.field(init=False)
    #: See `completions`.
    completed: tuple[tuple[Spec, Spec], ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        fresh = self.aliases == (None,) and self.outputs not in ((), (None,))
        self.completed = completions(self)
        moved = self.moves or self.completed
        self.is_simple = fresh and self.structure == "tensor" and not self.writes and not moved
        several = self.structure in ("tuple", "list") and set(self.aliases) == {None} and None not in self.outputs
        self.are_fresh = several and not self.writes and not moved
        self.is_inplace = (
            self.structure == "tensor" and len(self.writes) == 1 and self.aliases == self.writes and not moved
        )
        self.is_direct = not moved and len(self.writes) < 2
        tensor = self.structure == "tensor" and self.aliases == (0,) and self.outputs[0] is not None
        self.is_view = tensor and not (self.writes or moved or self.detached)
        self.is_whole_view = self.is_view and self._has_all()

    def _has_all(self) -> bool:
        base, view = self.call.inputs[0], self.outputs[0]  # type: ignore[union-attr]
        if all(p is REPLICATE for p in self.decision.inputs[0]):
            return False
        return view.nbytes == math.prod(base.shape) * base.dtype.itemsize


def plan_op(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], specs: list[Spec]) -> Plan:
    """The plan of one op: `describe` the call, `decide` where it runs, `write_plan`."""
    return write_plan(decide(info, describe(info, args, kwargs, specs), specs), specs)


def describe(
    info: OpInfo,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: list[Spec],
    inputs: tuple[TensorArg, ...] | None = None,
    checked: bool = False,
) -> Call:
    """The call of an op, with what it gives.

    Args:
        args, kwargs: the call's arguments, with a `TensorArg` for every tensor, numbered in order.
        specs: the tensors' specs.
        inputs: those `TensorArg`, if they are at hand.
        checked: the caller sees to `check`.

    Raises:
        MeshMismatch: tensors on different meshes.
        shapes.DataDependent: the outputs' shapes depend on values.
        Exception: torch's own error for arguments that do not fit.
    """
    mesh = common_mesh(info.op, specs)
    inferred = shapes.infer(info.op, args, kwargs)
    if inputs is None:
        inputs = tuple([TensorArg(i, tuple(s.shape), s.stride, s.dtype) for i, s in enumerate(specs)])
    outputs = tuple([None if out is None else TensorArg(i, *out) for i, out in enumerate(inferred)])
    call = Call(info.op, args, kwargs, inputs, outputs)
    if not checked:
        check(call, mesh)
    return call


def check(call: Call, mesh: DeviceMesh) -> None:
    """Raise what the kernels of the mesh's devices refuse, though its shapes can be inferred."""
    if mesh.device_type == "cpu":
        checks.check(call.op, call.args, call.kwargs)


def decide(info: OpInfo, call: Call, specs: list[Spec], weighed: Weighed | None = None) -> Choice:
    """Where an op will run; ``weighed``: among what, if that is known of its form."""
    writes = info.writes(call.args, call.kwargs)
    decision = choose(call, specs, writes) if weighed is None else weighed.choose(call, specs)
    return Choice(info, call, decision, writes, specs[0].mesh, _moves(decision, specs))


def _moves(decision: Decision, specs: Sequence[Spec]) -> tuple[tuple[Spec, Spec], ...]:
    return tuple(
        [
            (spec, spec.with_placements(placements))
            for spec, placements in zip(specs, decision.inputs, strict=True)
            if placements != spec.placements
        ]
    )


def plan_gathered(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], specs: list[Spec], outputs: int) -> Plan:
    """The plan of an op whose outputs' shapes depend on values: run replicated; the outputs' specs are not known."""
    mesh = common_mesh(info.op, specs)
    if mesh.device_type == "cpu":
        checks.check(info.op, args, kwargs)
    builder = Builder(mesh, len(specs), info.count_numbers(args, kwargs))
    moves = []
    slots = []
    for index, spec in enumerate(specs):
        target = spec.replicate()
        if target is not spec:
            moves.append((spec, target))
        slots.append(index if target is spec else builder.reshard(index, spec, target))
    outs = [builder.slot() for _ in range(outputs)]
    writer = ArgWriter(info, builder, slots, {})
    written, named = writer.write(args, kwargs)
    builder.op(info.name, written, outs, named)
    program = builder.program(info.name, outs)
    placements = tuple(spec.replicate().placements for spec in specs)
    decision = Decision(placements, (), gathered=True)
    return Plan(program, builder.operands, (), info.structure, (), False, (), decision, tuple(moves), mesh)


def common_mesh(op: Any, specs: list[Spec]) -> DeviceMesh:
    mesh = specs[0].mesh
    for spec in specs:
        if spec.mesh is not mesh:
            raise errors.MeshMismatch(
                f"{op}: tensors on different meshes: {mesh} and {spec.mesh}. "
                f"Bring one to the other's mesh first: x.redistribute(device_mesh=other.device_mesh)"
            )
    return mesh


def write_plan(choice: Choice, specs: list[Spec]) -> Plan:
    """The plan for tensors of ``specs``, for which ``choice`` was made."""
    info, call, decision, writes, mesh = choice.info, choice.call, choice.decision, choice.writes, choice.mesh
    builder = Builder(mesh, len(specs), info.count_numbers(call.args, call.kwargs))
    slots = list(range(len(specs)))
    if choice.moves:
        # What is written, or viewed and then written, has to be one place in memory where it was one.
        reshard = Builder.reshard if choice.makes_fresh else expanded.reshard
        for index, (spec, placements) in enumerate(zip(specs, decision.inputs, strict=True)):
            if placements != spec.placements:
                slots[index] = reshard(builder, index, spec, spec.with_placements(placements))
    outs = write_op(builder, info, call, decision, slots, info.physical or info.name)
    for index in writes:
        if slots[index] != index:  # computed on a copy elsewhere: bring it back, the target keeps its placements
            spec = specs[index]
            back = expanded.reshard(builder, slots[index], spec.with_placements(decision.inputs[index]), spec)
            expanded.assign(builder, index, back, spec)
    outputs = _finish(builder, info, call, decision, outs, mesh)
    returned = info.returned_inputs
    kept = [slot for slot in outs if slot >= 0]
    aliases = tuple(info.alias_of(i, call.args, call.kwargs) for i in range(len(call.outputs)))
    detached = info.physical is not None or any(
        a is not None and slots[a] != a for i, a in enumerate(aliases) if i not in returned
    )
    return Plan(
        builder.program(info.name, kept),
        builder.operands,
        outputs,
        info.structure,
        aliases,
        detached,
        writes,
        decision,
        choice.moves,
        mesh,
        call,
        nbytes=fresh_bytes(info, outputs),
        names_shapes=builder.names_shapes,
    )


def fresh_bytes(info: OpInfo, outputs: tuple[Spec | None, ...]) -> int:
    """What a device allocates for the results, about."""
    returned = info.returned_inputs
    return sum([spec.local_nbytes for i, spec in enumerate(outputs) if spec is not None and i not in returned])


def write_op(builder: Builder, info: OpInfo, call: Call, decision: Decision, slots: list[int], name: str) -> list[int]:
    """Write the op itself, as ``name``, on inputs in ``slots`` that are where ``decision`` wants them; the slots of its outputs."""
    # The output's shape, not the argument itself, which may hold a -1.
    local_shapes = {
        name: builder.layout(decision.outputs[out], call.outputs[out].shape)  # type: ignore[arg-type, union-attr]
        for name, out in decision.local_shapes.items()
    }
    args, kwargs = ArgWriter(info, builder, slots, local_shapes).write(call.args, call.kwargs)
    returned = info.returned_inputs
    outs = [-1 if out is None or i in returned else builder.slot() for i, out in enumerate(call.outputs)]
    local = decision.local or info.local
    if local is None:
        orders = [
            None if out is None or i in returned or len(out.shape) < 2 else stride_order(out.shape, out.stride)
            for i, out in enumerate(call.outputs)
        ]
        builder.body.append(Op(name, args, kwargs, list(outs), [] if info.is_view else orders))
    else:
        builder.body.append(
            Local(
                local,
                args,
                kwargs,
                list(outs),
                [builder.layout(p, t.shape) for p, t in zip(decision.inputs, call.inputs, strict=True)],
                [
                    builder.layout(p, t.shape)
                    for p, t in zip(decision.outputs, call.outputs, strict=True)
                    if p is not None
                ],
            )
        )
    return outs


def completions(plan: Choice | Plan) -> tuple[tuple[Spec, Spec], ...]:
    """The outputs whose pending reductions are completed before the plan ends: as the op returns them, and after."""
    if plan.call is None:
        return ()
    found = []
    for out, placements in zip(plan.call.outputs, plan.decision.outputs, strict=False):
        if out is not None and placements is not None and _is_completed(plan.decision, placements):
            spec = Spec.of(plan.mesh, placements, out.shape, out.stride, out.dtype)
            found.append((spec, _done(plan.decision, spec)))
    return tuple(found)


def returns(plan: Choice | Plan, specs: Sequence[Spec]) -> list[tuple[Spec, Spec]]:
    """What is computed on copies of inputs that are written, elsewhere, and brought back: from where, and to where."""
    there = [(spec.with_placements(plan.decision.inputs[i]), spec) for i, spec in enumerate(specs) if i in plan.writes]
    return [(source, target) for source, target in there if source is not target]


def _is_completed(decision: Decision, placements: PlacementList) -> bool:
    return any(is_partial(p) and (decision.finish or p.reduce_op != "sum") for p in placements)  # type: ignore[attr-defined]


def _done(decision: Decision, spec: Spec) -> Spec:
    return spec.with_placements(PlacementList(_completed(p, bool(decision.finish)) for p in spec.placements))


def _finish(
    builder: Builder, info: OpInfo, call: Call, decision: Decision, outs: list[int], mesh: DeviceMesh
) -> tuple[Spec | None, ...]:
    """Complete the reductions that may not leave a plan; the outputs' specs. Updates ``outs`` to the final slots."""
    specs: list[Spec | None] = []
    for i, (out, placements) in enumerate(zip(call.outputs, decision.outputs, strict=True)):
        if out is None or placements is None:
            specs.append(None)
            continue
        spec = Spec.of(mesh, placements, out.shape, out.stride, out.dtype)
        if outs[i] >= 0 and _is_completed(decision, placements):
            done = _done(decision, spec)
            outs[i] = builder.reshard(outs[i], spec, done)
            spec = done
        specs.append(spec)
    if decision.finish is not None:
        fresh = [slot if slot < 0 else builder.slot() for slot in outs]
        args, kwargs = ArgWriter(info, builder, [-1] * len(call.inputs), {}).write(
            tuple(_without_tensors(a) for a in call.args), {k: _without_tensors(v) for k, v in call.kwargs.items()}
        )
        builder.body.append(
            Local(
                decision.finish,
                [[Slot(slot) for slot in outs if slot >= 0], *args],
                kwargs,
                fresh,
                [builder.layout(p, t.shape) for p, t in zip(decision.inputs, call.inputs, strict=True)],
                [builder.layout(s.placements, tuple(s.shape)) for s in specs if s is not None],
            )
        )
        outs[:] = fresh
    return tuple(specs)


def _completed(placement: Any, all_reductions: bool) -> Any:
    return REPLICATE if is_partial(placement) and (all_reductions or placement.reduce_op != "sum") else placement


def _without_tensors(value: Any) -> Any:
    if isinstance(value, TensorArg):
        return None
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item) for item in value]
    return value
