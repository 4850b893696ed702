"""Forms: what calls of one op on tensors of other sizes have in common, so that they share a program and the choice of where it runs.

Each step of a decode loop with a growing cache meets new shapes in every op that touches the cache. The form of a call keeps the op, its
constants and, of the tensors, all but the sizes; of these which are equal, 0 or 1, and for rules that ask how large sharded dims are. A
choice that was *free* (nothing moves, and no other was weighed) follows from the form wherever the op's rule does
(`RuleEntry.by_form`), and a program without shapes in it does then too.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from ..placement import is_split
from .builder import order_or_none
from .plan import Plan, fresh_bytes
from .schema import OpInfo
from .spec import Spec
from .strategy import Call, TensorArg, enlarges


class Kind:
    """What the form of a call has of a tensor: all that its spec says but sizes. Interned."""

    __slots__ = ("__weakref__",)


_KINDS: weakref.WeakValueDictionary[tuple, Kind] = weakref.WeakValueDictionary()


def kind_of(spec: Spec) -> Kind:
    """The kind of tensors of ``spec``, which keeps it."""
    # Placements are compared by identity, as everywhere in planning: hashing one runs Python.
    parts = (spec.mesh, *map(id, spec.placements), len(spec.shape), _order(spec), spec.dtype)
    spec.kind = _KINDS.get(parts) or _KINDS.setdefault(parts, Kind())
    return spec.kind


def form_of(info: OpInfo, call: Call, specs: Sequence[Spec]) -> tuple[Any, ...]:
    """The form of ``call`` on tensors of ``specs``."""
    sizes = [0, 1]
    form = [info, *[_form(v, a.is_number, specs, sizes) for v, a in zip(call.args, info.arguments, strict=False)]]
    for name, value in call.kwargs.items():
        form += (name, _form(value, info.by_name[name].is_number, specs, sizes))
    if info.by_shards:
        form += [spec.shape[p.dim] for spec in specs for p in spec.placements if is_split(p)]  # type: ignore[attr-defined]
    for out in call.outputs:
        if out is None:
            form.append(None)
        else:
            sizes += out.shape
            form += (len(out.shape), _order(out), out.dtype)
    form.append(tuple(map(sizes.index, sizes)))  # each size as the place of the first that equals it
    return tuple(form)


def _form(value: Any, is_number: bool, specs: Sequence[Spec], sizes: list[int]) -> Any:
    """What the form has of an argument; the sizes of its tensors are appended."""
    kind = type(value)
    if kind is TensorArg:
        sizes += value.shape
        spec = specs[value.index]
        return spec.kind or kind_of(spec)
    if kind is list or kind is tuple:
        return tuple([_form(item, is_number, specs, sizes) for item in value])
    if is_number and (kind is float or kind is int or kind is bool):
        return kind, enlarges(value)
    return value


def _order(tensor: Any) -> tuple[int, ...] | None:
    order = order_or_none(tensor)
    return None if order is None else tuple(order)


def serves_its_form(plan: Plan) -> bool:
    """Whether other calls of the form may run the program of ``plan``."""
    return plan.decision.free and not plan.names_shapes and len(plan.program.body) == 1


def resized(info: OpInfo, plan: Plan, call: Call) -> Plan:
    """The plan of ``call``, which has the form of the call that ``plan`` was made for."""
    other = object.__new__(Plan)
    fields = vars(other)
    fields.update(vars(plan))
    fields["outputs"] = outputs = tuple(
        [
            None if spec is None else spec.resized(out.shape, out.stride)  # type: ignore[union-attr]
            for spec, out in zip(plan.outputs, call.outputs)  # noqa: B905 - one for each
        ]
    )
    fields["call"] = call
    fields["nbytes"] = fresh_bytes(info, outputs)
    return other
