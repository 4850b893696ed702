"""What a call of an op is planned by, and the plans that are kept.

Placements are decided once for each form of a call, shapes and strides once for each key (`dtorch.sharding.plan`, `dtorch.sharding.forms`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..sharding.choose import Weighed
from ..sharding.forms import form_of, resized, serves_its_form
from ..sharding.plan import Choice, Plan, check, decide, describe, write_plan
from ..sharding.spec import Spec
from ..sharding.strategy import TensorArg
from ..tensor import Tensor
from . import runtime
from .controller import Controller
from .recent import Recent

if TYPE_CHECKING:
    from .dispatch import CallInfo

log = logging.getLogger("dtorch")

#: Plans kept, over all ops: some 50 MB (`benchmarks/receivers`).
PLANS_KEPT = 20_000
#: A `Choice` where something moves first: with kept copies its own program is never run.
PLANS = Recent(PLANS_KEPT)
#: By their form: a plan that serves every call of it, or what each chooses among.
FORMS = Recent(PLANS_KEPT)

#: Follows the type of a number in a key if the number `enlarges`: then pending sums may not be scaled by it.
ENLARGES = object()

#: What is no tensor, and holds none: `isinstance` of a tensor takes longer.
_CONSTANTS = frozenset({int, bool, type(None)})


def forget_plans() -> None:
    """A cluster ended, so its programs are gone; or what ops give has changed."""
    log.debug("plans: %r; forms: %r", PLANS, FORMS)
    PLANS.forget()
    FORMS.forget()


class Unplaced(Exception):
    """The call has a tensor that is not placed yet."""


def key_of(
    info: CallInfo, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], numbers: list[Any]
) -> tuple | None:
    """All that the plan of a call depends on, its tensors and numbers appended; None if a tensor is not placed."""
    key: list[Any] = [info]
    try:
        for value, is_number in zip(args, info.positions_of_numbers):  # noqa: B905 - the schema may be longer
            kind = type(value)
            if kind is Tensor:
                spec = value._spec
                if spec is None:
                    raise Unplaced
                key.append(spec)
                tensors.append(value)
            elif is_number and (kind is float or kind is int or kind is bool):
                key.append(kind)
                if not -1.0 <= value <= 1.0:
                    key.append(ENLARGES)
                numbers.append(value)
            elif kind in _CONSTANTS:
                key.append(value)
            elif kind is list or kind is tuple or isinstance(value, torch.Tensor):
                key.append(collect(value, is_number, tensors, numbers))
            else:
                key.append(value)
        for name, value in kwargs.items():
            key.append(name)
            key.append(collect(value, info.by_name[name].is_number, tensors, numbers))
    except Unplaced:
        return None
    return tuple(key)


def collect(value: Any, is_number: bool, tensors: list[Tensor], numbers: list[Any]) -> Any:
    """The part of the key that ``value`` makes; its tensors and numbers are appended."""
    kind = type(value)
    if kind is Tensor:
        if value._spec is None:
            raise Unplaced
        tensors.append(value)
        return value._spec
    if is_number and (kind is float or kind is int or kind is bool):
        numbers.append(value)
        return kind if -1.0 <= value <= 1.0 else (kind, ENLARGES)
    if kind is list or kind is tuple:
        if not is_number and value and type(value[0]) is int:  # sizes or dims: a list of ints has nothing else
            return tuple(value)
        return tuple([collect(item, is_number, tensors, numbers) for item in value])
    if isinstance(value, torch.Tensor):
        raise Unplaced
    return value


def make_plan(
    info: CallInfo,
    args: Any,
    kwargs: dict[str, Any],
    tensors: Sequence[Tensor],
    numbers: Sequence[Any],
    controller: Controller,
    choice: Choice | None,
) -> Plan | Choice:
    """Plan a call, and tell the workers its program unless kept copies may make it needless."""
    for tensor in tensors:
        if tensor._value.id < controller.floor:
            raise controller.foreign()
    specs = [t._spec for t in tensors]
    if choice is None:
        metas: list[TensorArg] = []
        given = with_metas(args, kwargs, metas)
        by_form = info.is_checked_by_form and not numbers
        described = describe(info, *given, specs, tuple(metas), checked=by_form)
    else:
        described, by_form = choice.call, False
    form = served = None
    if info.by_form:
        form = form_of(info, described, specs)
        served = FORMS.get(form) or FORMS.older(form)
        if type(served) is Plan:
            return resized(info, served, described)
    if by_form:
        check(described, specs[0].mesh)
    # Where everything has been moved already the choice is free when made anew, so that its plan can serve its form.
    choice = None if choice is None else choice.at(specs)
    if choice is None or (info.by_form and not choice.moves):
        choice = decide(info, described, specs, served)
    controller.mesh(choice.mesh)
    if form is not None and served is None and choice.moves and not choice.writes:
        weighed = Weighed.of(described, specs)
        if weighed is not None:
            FORMS.put(form, weighed)
    if choice.moves and choice.makes_fresh:
        return choice
    plan = written_plan(choice, specs, controller)
    if form is not None and serves_its_form(plan):
        FORMS.put(form, plan)
    return plan


def written_plan(choice: Choice, specs: list[Spec], controller: Controller) -> Plan:
    """The plan of a choice, its program known to the workers."""
    plan = write_plan(choice, specs)
    plan.program_id = controller.define(plan.program)
    log.debug(
        "plan of %s: program %d, outputs %s, moves %s", choice.info.name, plan.program_id, plan.outputs, plan.moves
    )
    return plan


def with_metas(
    args: Any, kwargs: dict[str, Any], metas: list[TensorArg] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a `TensorArg` for every tensor, numbered in order, and appended to ``metas``."""
    found: list[TensorArg] = [] if metas is None else metas

    def convert(value: Any) -> Any:
        kind = type(value)
        if kind is Tensor:
            spec = value._spec
            meta = TensorArg(len(found), tuple(spec.shape), spec.stride, spec.dtype)
            found.append(meta)
            return meta
        if kind is list or kind is tuple or isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return value

    return tuple([convert(a) for a in args]), {name: convert(v) for name, v in kwargs.items()} if kwargs else {}


def with_tensors(args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> tuple[Any, dict[str, Any]]:
    """The arguments with other tensors, numbered in order."""
    following = iter(tensors)
    return tuple([_replaced(a, following) for a in args]), {name: _replaced(v, following) for name, v in kwargs.items()}


def _replaced(value: Any, following: Iterator[Tensor]) -> Any:
    """No closure of `with_tensors`, which would refer to itself, and keep the tensors until a collection."""
    if type(value) is Tensor:
        return next(following)
    return [_replaced(item, following) for item in value] if isinstance(value, (list, tuple)) else value


runtime.on_close.append(forget_plans)
