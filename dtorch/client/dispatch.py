"""From a call of an op on tensors to a command in the outbox.

The way of ``z = x + y``: key of (op, specs, constants) → plan → outputs wrapped at once from the plan's specs → one command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import get_default_dtype

from ..errors import MeshMismatch
from ..interrupts import critical
from ..sharding import shapes
from ..sharding.plan import Choice, Plan, returns
from ..sharding.schema import OpInfo
from ..tensor import Tensor
from . import aliasing, gathered, host, inserted, kept, meshes, runtime
from .aliasing import root_of
from .controller import AHEAD_BYTES, LARGE_BYTES, LOOK, Controller
from .handles import describe as describe_handle
from .handles import wrap, wrap_view
from .planning import PLANS, forget_plans, key_of, make_plan, with_tensors, written_plan
from .torch_internals import make_wrapper
from .values import FREED, Taken, new_value, next_value_id

#: Frames from `History.note` up to who called `dispatch`, by way of `execute_simple`; `execute` takes one more.
CALLER = 5


class CallInfo(OpInfo):
    """An op's schema, the client's own way of running it if it has one, and its plans."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        super().__init__(op)
        from . import special

        self.handler = special.handler_for(self)


#: By the op's id: hashing an OpOverload runs Python. Each info keeps its op alive.
_INFOS: dict[int, CallInfo] = {}


def info_of(op: Any) -> CallInfo:
    found = _INFOS.get(id(op))
    if found is None:
        found = _INFOS[id(op)] = CallInfo(op)
    return found


def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``Tensor.__torch_dispatch__``."""
    info = _INFOS.get(id(func))
    if info is None:
        info = info_of(func)
    if kwargs is None:
        kwargs = {}
    if info.handler is not None:
        result = info.handler(info, args, kwargs)
        if result is not NotImplemented:
            return result
    return call(info, args, kwargs)


def call(info: CallInfo, args: Any, kwargs: dict[str, Any], choice: Choice | None = None) -> Any:
    """Run an op that needs no special way; ``choice``: where, if that is known."""
    tensors: Sequence[Tensor]
    numbers: Sequence[Any]
    key: tuple | None = None
    if len(args) == 2 and not kwargs and type(args[0]) is Tensor and type(args[1]) is Tensor:
        tensors, numbers = args, ()
        one, other = args[0]._spec, args[1]._spec
        if one is not None and other is not None:
            key = (info, one, other)
    else:
        tensors, numbers = [], []
        key = key_of(info, args, kwargs, tensors, numbers)
    if key is None:
        return place_and_call(info, args, kwargs)
    controller = runtime._controller
    if controller is None:
        controller = runtime.controller()
    if get_default_dtype() is not controller.default_dtype:
        forget_plans()
        controller.follow_default_dtype()
    plan = PLANS.get(key) or PLANS.older(key)
    if plan is None:
        is_dependent, mismatch = False, None
        try:
            plan = make_plan(info, args, kwargs, tensors, numbers, controller, choice)
        except shapes.DataDependent:
            is_dependent = True
        except MeshMismatch as error:
            mismatch = error.with_traceback(None)  # whose frames would keep the tensors
        if is_dependent:
            return gathered.run(info, args, kwargs, tensors, numbers, controller)
        if plan is None:
            return meshes.run(info, args, kwargs, tensors, mismatch)
        PLANS.put(key, plan)
    if inserted.mode != "allow":
        aliasing.tell(tensors, plan.writes)
    if plan.is_simple:
        return execute_simple(info, plan, tensors, numbers, controller)
    if plan.are_fresh:
        return execute_several(info, plan, tensors, numbers, controller)
    if plan.is_inplace and tensors[plan.writes[0]]._value.copy is None:
        return execute_inplace(info, plan, tensors, numbers, controller)
    if plan.is_view:
        return execute_view(info, plan, args, kwargs, tensors[0], numbers, controller)
    return execute(info, plan, args, kwargs, tensors, numbers, controller)


def place_and_call(info: CallInfo, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call in which some tensor is uncommitted or plain: on the client if none is placed, else place them first."""
    result = host.run(info, args, kwargs)
    if result is not NotImplemented:
        return result
    return call(info, *host.place(info, args, kwargs, host.mesh_of(args, kwargs)))


def execute(
    info: CallInfo,
    plan: Plan | Choice,
    args: Any,
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    controller: Controller,
) -> Any:
    """Queue one run of a plan and wrap what it returns."""
    if not plan.is_direct:
        several = len(plan.writes) > 1 and isinstance(args[0], (list, tuple)) and len(args[0]) > 1
        if several and aliasing.interfere(plan, tensors):
            return one_by_one(info, args, kwargs)
        if type(plan) is Choice:
            uses = plan.kept
            if uses is None:
                uses = plan.kept = kept.Uses(plan, [t._spec for t in tensors])
            if uses.pending:
                whole = kept.summed_before(uses, tensors, controller)
                if whole is not None:
                    return call(info, *with_tensors(args, kwargs, whole))
        if inserted.is_heard(plan.decision.gathered):
            specs = [t._spec for t in tensors]
            if type(plan) is Choice:
                moves, completed = kept.moves_of(plan, uses, tensors), uses.completed
            else:
                moves, completed = plan.moves, plan.completed
            if moves or completed:
                moves = (*moves, *completed, *returns(plan, specs))
                inserted.tell(info.name, specs, moves, plan.decision.gathered, plan.call)
        if type(plan) is Choice:
            copies, count = kept.brought(uses, tensors, info.name, controller)
            if count:
                if uses.plan is not None and count == len(plan.moves):
                    return execute_simple(info, uses.plan, copies, numbers, controller)
                args, kwargs = with_tensors(args, kwargs, copies)
                result = call(info, args, kwargs, plan)
                if count == len(plan.moves):
                    uses.plan = _simple_plan(info, args, kwargs)
                return result
            if plan.plan is None:
                plan.plan = written_plan(plan, [t._spec for t in tensors], controller)
            plan = plan.plan
    if plan.nbytes > LARGE_BYTES and FREED:
        with controller.lock:
            controller.drain()
    results = _queue(info, plan, args, kwargs, tensors, numbers, controller)
    controller.ran(plan.nbytes)
    structure = plan.structure
    if structure == "tensor":
        return results[0]
    if structure == "tuple":
        return tuple(results)
    if structure == "list":
        return results
    return None


def _simple_plan(info: CallInfo, args: Any, kwargs: dict[str, Any]) -> Plan | None:
    """The plan by which a call has just been run, if it was `execute_simple` that ran it."""
    plan = PLANS.get(key_of(info, args, kwargs, [], []))
    return plan if type(plan) is Plan and plan.is_simple else None


@critical
def _queue(
    info: CallInfo,
    plan: Plan,
    args: Any,
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    controller: Controller,
) -> list[Any]:
    """Queue the command and bring writes to their aliases; the results."""
    with controller.lock:
        command = [plan.program_id]
        floor = controller.floor
        for tensor in tensors:
            value = tensor._value
            if value.id < floor:
                raise controller.foreign()
            if value.copy is not None:
                aliasing.refresh(controller, value)
            command.append(value.id)
        results: list[Any] = []
        returned = info.returned_inputs
        for i, (spec, alias) in enumerate(zip(plan.outputs, plan.aliases, strict=True)):
            if i in returned:
                results.append(None if alias is None else tensors[alias])
            elif spec is None:
                results.append(None)
            elif alias is None:
                value = new_value()
                command.append(value.id)
                results.append(wrap(spec, value))
            else:
                value = aliasing.view_value(next_value_id(), spec, plan, i, info, tensors[alias], args, kwargs)
                command.append(value.id)
                results.append(wrap_view(spec, value, tensors[alias]))
        if numbers:
            command += numbers
        if plan.operands:
            command += plan.operands
        controller.issue(command, info.name, CALLER + 1)
        for i in plan.writes:
            aliasing.written(controller, tensors[i]._value)
    return results


def one_by_one(info: CallInfo, args: Any, kwargs: dict[str, Any]) -> list[Any] | None:
    """Run an op on lists as torch does, one tensor after the other."""
    count = meshes.count_of(args)

    def item(value: Any, i: int) -> Any:
        return [value[i]] if meshes.is_list_of(value, count) else value

    results = []
    for i in range(count):
        made = call(info, tuple([item(a, i) for a in args]), {name: item(v, i) for name, v in kwargs.items()})
        results += made or ()
    return results if info.structure == "list" else None


def execute_simple(
    info: CallInfo,
    plan: Plan,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    controller: Controller,
    caller: int = CALLER,
) -> Tensor:
    """`execute` for the common kind of op: one fresh result, nothing written. ``caller``: frames, as `CALLER`."""
    if plan.nbytes > LARGE_BYTES and FREED:
        with controller.lock:
            controller.drain()
    made = new_value()
    command = [plan.program_id]
    floor = controller.floor
    with controller.lock:
        for tensor in tensors:
            value = tensor._value
            if value.id < floor:
                raise controller.foreign()
            if value.copy is not None:
                aliasing.refresh(controller, value)
            command.append(value.id)
        command.append(made.id)
        if numbers:
            command += numbers
        if plan.operands:
            command += plan.operands
        controller.issue(command, info.name, caller)
    spec = plan.outputs[0]
    result = make_wrapper(*(spec.handle or describe_handle(spec)))
    result._spec = spec
    result._value = made
    controller.bytes_ahead += plan.nbytes
    if not controller.sequence & LOOK or controller.bytes_ahead > AHEAD_BYTES or controller.sync:
        controller.ran(0)
    return result


def execute_several(
    info: CallInfo, plan: Plan, tensors: Sequence[Tensor], numbers: Sequence[Any], controller: Controller
) -> tuple[Tensor, ...] | list[Tensor]:
    """`execute` for an op with several fresh results, nothing written, nothing moved."""
    if plan.nbytes > LARGE_BYTES and FREED:
        with controller.lock:
            controller.drain()
    results = []
    for spec in plan.outputs:
        result = make_wrapper(*(spec.handle or describe_handle(spec)))
        result._spec = spec
        result._value = new_value()
        results.append(result)
    command = [plan.program_id]
    floor = controller.floor
    with controller.lock:
        for tensor in tensors:
            value = tensor._value
            if value.id < floor:
                raise controller.foreign()
            if value.copy is not None:
                aliasing.refresh(controller, value)
            command.append(value.id)
        command += [result._value.id for result in results]
        if numbers:
            command += numbers
        if plan.operands:
            command += plan.operands
        controller.issue(command, info.name, CALLER)
    controller.ran(plan.nbytes)
    return results if plan.structure == "list" else tuple(results)


def execute_inplace(
    info: CallInfo,
    plan: Plan,
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    controller: Controller,
    caller: int = CALLER,
) -> Tensor:
    """`execute` for the common kind of in-place op: one tensor, which is no copy, is written where it is, and returned."""
    target = tensors[plan.writes[0]]
    command = [plan.program_id]
    floor = controller.floor
    with controller.lock:
        for tensor in tensors:
            value = tensor._value
            if value.id < floor:
                raise controller.foreign()
            if value.copy is not None:
                aliasing.refresh(controller, value)
            command.append(value.id)
        if numbers:
            command += numbers
        if plan.operands:
            command += plan.operands
        target._value.root.generation += 1  # before: a Ctrl-C after the write must not leave its aliases as they were
        controller.issue(command, info.name, caller)
    if not controller.sequence & LOOK or controller.sync:
        controller.ran(0)
    return target


def execute_view(
    info: CallInfo,
    plan: Plan,
    args: Any,
    kwargs: dict[str, Any],
    base: Any,
    numbers: Sequence[Any],
    controller: Controller,
) -> Tensor:
    """`execute` for the common kind of view: each device takes it of what it has."""
    value = base._value
    made = new_value()
    made._root = root_of(base)
    with controller.lock:
        if value.id < controller.floor:
            raise controller.foreign()
        if value.copy is not None:
            aliasing.refresh(controller, value)
            made.copy, made.keep = value.copy, value
        controller.issue([plan.program_id, value.id, made.id, *numbers, *plan.operands], info.name, CALLER)
    if plan.is_whole_view and args[0] is base:
        made.taken = Taken(ref(value), base._spec, info, args[1:], kwargs)
    spec = plan.outputs[0]
    result = wrap_view(spec, made, base)
    if not controller.sequence & LOOK or controller.sync:
        controller.ran(0)
    return result


Tensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]
