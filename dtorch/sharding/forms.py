"""Forms: what calls of one op on tensors of other sizes have in common, so that they share a program and the choice of where it runs.

Each step of a decode loop with a growing cache meets new shapes in every op that touches the cache. The form of a call keeps the op, its
constants and, of the tensors, all but the sizes; of these which are equal, 0 or 1, and for rules that ask how large sharded dims are. A
choice that was *free* (nothing moves, and no other was weighed) follows from the form wherever the op's rule does
(`RuleEntry.by_form`), and a program without shapes in it does then too.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ..placement import is_split
from .builder import order_or_none
from .plan import Plan, fresh_bytes
from .schema import OpInfo
from .spec import Spec
from .strategy import Call, TensorArg, enlarges


def form_of(info: OpInfo, call: Call, specs: Sequence[Spec]) -> tuple[Any, ...]:
    """The form of ``call`` on tensors of ``specs``."""
    known = {0: 0, 1: 1}
    form = [info, *[_form(v, a.is_number, specs, known) for v, a in zip(call.args, info.arguments, strict=False)]]
    for name, value in call.kwargs.items():
        form += (name, _form(value, info.by_name[name].is_number, specs, known))
    if info.by_shards:
        form += [spec.shape[p.dim] for spec in specs for p in spec.placements if is_split(p)]  # type: ignore[attr-defined]
    form += [None if o is None else (_sizes(o.shape, known), _order(o), o.dtype) for o in call.outputs]
    return tuple(form)


def _form(value: Any, is_number: bool, specs: Sequence[Spec], known: dict[int, int]) -> Any:
    kind = type(value)
    if kind is TensorArg:
        spec = specs[value.index]
        # Placements are compared by identity, as everywhere in planning: hashing one runs Python.
        return (spec.mesh, *map(id, spec.placements), _sizes(value.shape, known), _order(spec), value.dtype)
    if kind is list or kind is tuple:
        return tuple([_form(item, is_number, specs, known) for item in value])
    if is_number and (kind is float or kind is int or kind is bool):
        return kind, enlarges(value)
    return value


def _sizes(shape: Sequence[int], known: dict[int, int]) -> tuple[int, ...]:
    """Each size as the number of the first that equals it."""
    return tuple([known.setdefault(size, len(known)) for size in shape])


def _order(tensor: Any) -> tuple[int, ...] | None:
    order = order_or_none(tensor)
    return None if order is None else tuple(order)


def serves_its_form(plan: Plan) -> bool:
    """Whether other calls of the form may run the program of ``plan``."""
    return plan.decision.free and not plan.names_shapes and len(plan.program.body) == 1


def resized(info: OpInfo, plan: Plan, call: Call) -> Plan:
    """The plan of ``call``, which has the form of the call that ``plan`` was made for."""
    other = object.__new__(Plan)
    for name, value in zip(_FIELDS, _values_of(plan)):  # noqa: B905 - one for each
        _set(other, name, value)
    other.outputs = tuple(
        [
            None if spec is None else spec.resized(out.shape, out.stride)  # type: ignore[union-attr]
            for spec, out in zip(plan.outputs, call.outputs)  # noqa: B905 - one for each
        ]
    )
    other.call = call
    other.nbytes = fresh_bytes(info, other.outputs)
    return other


_FIELDS = tuple(name for name in Plan.__slots__ if name not in ("outputs", "call", "nbytes"))
_values_of = operator.attrgetter(*_FIELDS)
_set = object.__setattr__
