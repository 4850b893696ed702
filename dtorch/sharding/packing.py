"""Packed dims: what a rule that knows only whole dims says of them, and shapes in which they are none.

A dim that packs ``parts`` blocks is, under another shape, two dims, of which the second is sharded. So a redistribution is one of plain
placements between two views (`unpacked`). An op for which every index of a sharded dim is like every other, as a product of matrices is for
rows, is right for any set of indices that all its tensors agree on; `with_packed` adds those strategies for the rules that are known to be
so (`tests/sharding` runs each). Other ops get their input whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from ..placement import REPLICATE, Placement, PlacementList, is_packed, is_shard, is_split, packed, shard
from .rules import factories, foreach, indexing, matmul, norms, pointwise, reduce, views
from .spec import Spec
from .strategy import Call, Group, RuleEntry, Strategy, TensorArg, rule

aten = torch.ops.aten

#: Modules of rules all of which are right for any set of indices of a dim that they shard.
MODULES = frozenset({pointwise.__name__, foreach.__name__, matmul.__name__, reduce.__name__})
#: Single rules that are.
RULES = frozenset(
    {
        views._same, views.view, views.reshape, views.expand, views.permute, views.transpose, views.t, views.unsqueeze, views.squeeze,
        views.slice_, views.select, views.unbind, views.split, views.select_backward, factories.like, indexing.index, indexing.index_put,
        norms.softmax,
    }
)  # fmt: skip
#: Device functions that look at shapes only.
LOCAL = frozenset({"dtorch.view_as_output", "dtorch.norm_part", "dtorch.foreach_norm_part"})

SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})


@torch.library.custom_op("dtorch::join_evenly", mutates_args=())
def join_evenly(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """``cat`` of tensors of one shape, which are packed in the result if they are sharded along ``dim``."""
    return torch.cat(parts, dim)


@join_evenly.register_fake
def _(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(parts, dim)


JOIN = torch.ops.dtorch.join_evenly.default


@rule(JOIN)
def join(call: Call) -> list[Strategy]:
    parts, dim, local = len(call.inputs), call.get("dim"), "dtorch.join_evenly"
    found = [Strategy((shard(d),) * parts, (shard(d),), local=local) for d in range(call.inputs[0].ndim) if d != dim]
    return [
        *found,
        Strategy((shard(dim),) * parts, (packed(dim, parts),), even=call.inputs[0].shape[dim], local=local),
    ]


def with_packed(
    call: Call, entry: RuleEntry, found: list[Strategy] | list[Group], specs: Sequence[Spec]
) -> list[Strategy] | list[Group]:
    """What a rule says, and the same of the packed dims that ``specs`` have."""
    if not knows(entry):
        return found
    every = sorted({p.parts for spec in specs for p in spec.placements if is_packed(p)})  # type: ignore[attr-defined]
    if found and type(found[0]) is Group:
        return [_of_group(call, group, every) for group in found]  # type: ignore[arg-type]
    more = [s for parts in every for s in _packed(call.inputs, call.outputs, found, parts)]  # type: ignore[arg-type]
    if call.op in SPLITS:
        more += _taken_apart(call, every)
    return [*found, *more]  # type: ignore[list-item]


def _of_group(call: Call, group: Group, every: Iterable[int]) -> Group:
    inputs, outputs = [call.inputs[i] for i in group.inputs], [call.outputs[o] for o in group.outputs]
    more = [s for parts in every for s in _packed(inputs, outputs, group.strategies, parts)]
    return dataclasses.replace(group, strategies=(*group.strategies, *more))


def _packed(
    inputs: Sequence[TensorArg], outputs: Sequence[TensorArg | None], strategies: Iterable[Strategy], parts: int
) -> Iterable[Strategy]:
    """The strategies whose sharded dims all have one size, which ``parts`` divides, with that dim packed."""
    for strategy in strategies:
        size = size_of(inputs, outputs, strategy)
        if size and size % parts == 0:
            yield dataclasses.replace(
                strategy,
                inputs=tuple([_as_packed(p, parts) for p in strategy.inputs]),
                outputs=tuple([None if p is None else _as_packed(p, parts) for p in strategy.outputs]),
                even=math.gcd(strategy.even or 0, size // parts),
            )


def knows(entry: RuleEntry) -> bool:
    """Whether the strategies of a rule that have a `size_of` are right for any indices."""
    return entry.rule.__module__ in MODULES or entry.rule in RULES


def size_of(inputs: Sequence[TensorArg], outputs: Sequence[TensorArg | None], strategy: Strategy) -> int | None:
    """The one size of all dims that a strategy shards; None if there are several, or a device function that looks where it stands."""
    placed = [*zip(inputs, strategy.inputs, strict=True), *zip(outputs, strategy.outputs, strict=True)]
    sizes = {t.shape[p.dim] for t, p in placed if t is not None and p is not None and is_shard(p)}  # type: ignore[attr-defined]
    return sizes.pop() if len(sizes) == 1 and (strategy.local is None or strategy.local in LOCAL) else None


def _as_packed(placement: Placement, parts: int) -> Placement:
    return packed(placement.dim, parts) if is_shard(placement) else placement  # type: ignore[attr-defined]


def _taken_apart(call: Call, every: Iterable[int]) -> Iterable[Strategy]:
    """A split into the parts: each device has its part of each."""
    x = call.inputs[0]
    dim = call.get("dim") % x.ndim
    sizes = {o.shape[dim] for o in call.outputs if o is not None}
    count = len(call.outputs)
    if count in every and len(sizes) == 1:
        (size,) = sizes
        yield Strategy((packed(dim, count),), (shard(dim),) * count, even=size, local="dtorch.split_evenly")


def unpacked(spec: Spec, target: Spec) -> tuple[Spec, Spec] | None:
    """Both ends of a redistribution under a shape in which no dim is packed; None if there is none.

    Their stride order is that of ``spec``, with the parts of a dim before what they are parts of.
    """
    parts: dict[int, int] = {}
    plain: set[int] = set()
    for placement in (*spec.placements, *target.placements):
        if is_packed(placement):
            if parts.setdefault(placement.dim, placement.parts) != placement.parts:  # type: ignore[attr-defined]
                return None
        elif is_shard(placement):
            plain.add(placement.dim)  # type: ignore[attr-defined]
    if plain & parts.keys():
        return None
    shape: list[int] = []
    stride: list[int] = []
    at = []
    for dim, (size, step) in enumerate(zip(spec.shape, spec.stride, strict=True)):
        at.append(len(shape))
        if dim in parts:
            shape += [parts[dim], size // parts[dim]]
            stride += [step * (size // parts[dim]), step]
        else:
            shape.append(size)
            stride.append(step)
    ends = []
    for end in (spec, target):
        placements = [
            shard(at[p.dim] + 1) if is_packed(p) else shard(at[p.dim]) if is_shard(p) else p  # type: ignore[attr-defined]
            for p in end.placements
        ]
        ends.append(Spec.of(end.mesh, PlacementList(placements), shape, stride, end.dtype))
    return ends[0], ends[1]


def between(spec: Spec, target: Spec) -> Spec:
    """``spec`` with the dims whole that either end packs."""
    dims = {p.dim for p in (*spec.placements, *target.placements) if is_packed(p)}  # type: ignore[attr-defined]
    return spec.with_placements(
        PlacementList(REPLICATE if is_split(p) and p.dim in dims else p for p in spec.placements)  # type: ignore[attr-defined]
    )
