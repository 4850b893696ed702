"""Programs of attention over a split sequence, forward and backward: Ulysses, ring, or both at once; or the queries come to the keys.

Rearrange into where it computes, one ring of blocks, rearrange back. At each step of the ring the block at hand sets out to the next
device before it is computed on, and the next one is taken in after that, so the way is hidden. In the backward the gradients of a
block travel with it, one step behind: each device adds its own as they pass, and after a whole round they are home. Where keys stay
(`Roles.keys`) there is one block, and all devices get what the queries found at each, to merge by log-sum-exp; in the backward the
gradients of the queries are summed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import PARTIAL, REPLICATE, PlacementList, boxed, encode, is_shard, shard
from ..program.ir import Arg, Const, Local, Operand, Program, Rearrange, Roles, ShiftDone, ShiftStart, Slot
from ..raw import dtype_name
from .builder import Builder, order_or_none
from .layout import box_shape, stride_order
from .rearrange import is_needless
from .roles import SEQUENCE, whole_features
from .sequence import Sizes, boxes, ring_place, wide
from .spec import Spec, mesh_id

#: Programs whose communication was asked for, by the name of an axis or by `dtorch.nn.SdpaOption`.
ASKED_FOR = ("dtorch.context_parallel_attention", "dtorch.context_parallel_attention_backward")

#: The numbers of a run, before its operands.
SCALE, DROPOUT, KEY = Operand(0), Operand(1), Operand(2)
NUMBERS = 3


@dataclasses.dataclass(slots=True)
class AttentionPlan:
    """A program, its fixed operands, and the specs of what it returns.

    ``moves``: where its inputs are and where they are needed, as in `dtorch.sharding.plan.Plan`, if nobody asked for that.
    """

    program: Program
    operands: list[Any]
    outputs: tuple[Spec, ...]
    moves: tuple[tuple[Spec, Spec], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """One attention: where its parts are computed and how.

    Args:
        has_dropout: its probability and key are numbers of each run.
        asked_for: a name or an option says what each axis of the sequence does.
    """

    mesh: DeviceMesh
    roles: Roles
    sizes: Sizes
    is_causal: bool
    has_dropout: bool
    asked_for: bool

    def name(self, what: str) -> str:
        return f"dtorch.context_parallel_{what}" if self.asked_for else f"dtorch.{what}"

    def moves(self, query: Spec, key: Spec, value: Spec) -> tuple[tuple[Spec, Spec], ...]:
        """See `AttentionPlan`. Keys and values that travel a ring are needed all along it; what is found at keys that stay is summed."""
        if self.asked_for:
            return ()
        found = []
        for spec in (query, key, value):
            placements = list(spec.placements)
            for dim, axes in enumerate((self.roles.batch, self.roles.heads, self.roles.ring)):
                for axis in axes:
                    travels = dim == SEQUENCE and spec is not query
                    placements[axis] = REPLICATE if travels else shard(dim)
            for axis in self.roles.keys:
                placements[axis] = REPLICATE if spec is query else shard(SEQUENCE)
            found.append((spec, spec.with_placements(PlacementList(placements))))
        if self.roles.keys:
            merged = [PARTIAL if axis in self.roles.keys else p for axis, p in enumerate(query.placements)]
            found.append((query.with_placements(PlacementList(merged)), whole_features(query)))
        return tuple((source, target) for source, target in found if source is not target)


def forward(
    attention: Attention,
    query: Spec,
    key: Spec,
    value: Spec,
    mask: Spec | None,
    keep: Spec | None,
    order: list[int],
    wants_lse: bool,
) -> AttentionPlan:
    """The program of ``(query, key, value, mask?, keep?) -> (out, lse?)``.

    Args:
        keep: spec of a boolean tensor of all scores that says which ones dropout keeps; None: they are drawn from the run's key.
        order: the output's dims from the largest stride to the smallest.
        wants_lse: return the log-sum-exp, which `backward` needs.
    """
    specs = [query, key, value, *(s for s in (mask, keep) if s is not None)]
    writer = _Writer(attention, len(specs))
    q, k, v, *more = writer.inputs(specs, ["query", "key", "key", *["scores"] * (len(specs) - 3)])
    options = writer.options(mask is not None, keep is not None, more)
    out = lse = None
    for step in range(writer.ring):
        last = step == writer.ring - 1
        if not last:
            writer.start(k, key)
            writer.start(v, value)
        args = [Slot(q), Slot(k), Slot(v), _slot(out), _slot(lse), *options(step)]
        out, lse = writer.local("dtorch.attention_block", args, 2)
        if not last:
            k, v = writer.done(key.dtype), writer.done(value.dtype)
    assert out is not None
    assert lse is not None
    goal = whole_features(query)
    shape = torch.Size((*query.shape[:3], value.shape[3]))
    out_spec = Spec.of(attention.mesh, goal.placements, shape, _stride(shape, order), query.dtype)
    lse_spec = Spec.of(attention.mesh, goal.placements, query.shape[:3], None, wide(query.dtype))
    bring = writer.back
    if attention.roles.keys:
        out, lse = writer.merged(out, lse, out_spec)
        bring = writer.cut
    (out,) = writer.local(
        "dtorch.attention_finish", [Slot(out), Const("dtype", dtype_name(query.dtype)), list(order)], 1
    )
    outs = [bring(out, out_spec, "query")]
    if wants_lse:
        outs.append(bring(lse, lse_spec, "query"))
    program = writer.builder.program(attention.name("attention"), outs)
    moves = attention.moves(query, key, value)
    return AttentionPlan(program, writer.builder.operands, (out_spec, lse_spec)[: len(outs)], moves)


def backward(
    attention: Attention,
    query: Spec,
    key: Spec,
    value: Spec,
    mask: Spec | None,
    keep: Spec | None,
    out: Spec,
    lse: Spec,
    grad: Spec,
    wants_mask: bool,
) -> AttentionPlan:
    """The program of ``(query, key, value, mask?, keep?, out, lse, grad) -> (grad_query, grad_key, grad_value, grad_mask?)``."""
    specs = [query, key, value, *(s for s in (mask, keep) if s is not None), out, lse, grad]
    scores = len(specs) - 6
    writer = _Writer(attention, len(specs))
    slots = writer.inputs(specs, ["query", "key", "key", *["scores"] * scores, "query", "query", "query"])
    q, k, v = slots[:3]
    options = writer.options(mask is not None, keep is not None, slots[3 : 3 + scores])
    rest = [Slot(slot) for slot in slots[3 + scores :]]
    kind = wide(query.dtype)
    wide_key, wide_value = (Spec.of(s.mesh, s.placements, s.shape, s.stride, kind) for s in (key, value))
    grad_q = grad_mask = None
    grad_k = grad_v = -1
    for step in range(writer.ring):
        last = step == writer.ring - 1
        if not last:
            writer.start(k, key)
            writer.start(v, value)
        args = [Slot(q), Slot(k), Slot(v), *rest, _slot(grad_q), _slot(grad_mask), wants_mask, *options(step)]
        grad_q, more_k, more_v, *of_mask = writer.local("dtorch.attention_block_backward", args, 4 if wants_mask else 3)
        grad_mask = of_mask[0] if of_mask else None
        if step:
            grad_k, grad_v = (
                writer.local("dtorch.attention_add", [Slot(writer.done(kind)), Slot(more)], 1)[0]
                for more in (more_k, more_v)
            )
        else:
            grad_k, grad_v = more_k, more_v
        if not last:
            k, v = writer.done(key.dtype), writer.done(value.dtype)
        if writer.ring > 1:
            writer.start(grad_k, wide_key)
            writer.start(grad_v, wide_value)
    if writer.ring > 1:
        grad_k, grad_v = writer.done(kind), writer.done(kind)
    found = [(grad_q, query, "query"), (grad_k, key, "key"), (grad_v, value, "key"), (grad_mask, mask, "scores")]
    outs, goals = [], []
    for slot, spec, what in found:
        if slot is None or spec is None:
            continue
        goal = whole_features(spec) if what != "scores" else _summed(spec)
        order = stride_order(goal.shape, goal.stride)
        (slot,) = writer.local(
            "dtorch.attention_finish", [Slot(slot), Const("dtype", dtype_name(goal.dtype)), list(order)], 1
        )
        outs.append(writer.back(slot, goal, what))
        goals.append(goal)
    program = writer.builder.program(attention.name("attention_backward"), outs)
    return AttentionPlan(program, writer.builder.operands, tuple(goals), attention.moves(query, key, value))


class _Writer:
    """Writes the program of one attention."""

    def __init__(self, attention: Attention, inputs: int) -> None:
        self.attention = attention
        self.builder = Builder(attention.mesh, inputs, NUMBERS)
        self.ring, _ = ring_place(attention.mesh.shape, (0,) * attention.mesh.ndim, attention.roles.ring)

    def inputs(self, specs: list[Spec], kinds: list[str]) -> list[int]:
        """Bring every input to where the attention computes; their slots."""
        slots = []
        for slot, (spec, kind) in enumerate(zip(specs, kinds, strict=True)):
            goal = whole_features(spec) if kind != "scores" else _summed(spec)
            if goal is not spec:
                slot = self.builder.reshard(slot, spec, goal)
            slots.append(self._rearranged(slot, goal, kind, back=False))
        return slots

    def back(self, slot: int, spec: Spec, kind: str) -> int:
        """Bring what was computed to ``spec``."""
        return self._rearranged(slot, spec, kind, back=True)

    def merged(self, out: int, lse: int, spec: Spec) -> tuple[int, int]:
        """Merge what the queries found at each place along `Roles.keys`: output and log-sum-exp, all queries on each device."""
        places, _ = ring_place(self.attention.mesh.shape, (0,) * spec.mesh.ndim, self.attention.roles.keys)
        batch, heads, queries, features = spec.shape
        (part,) = self.local("dtorch.attention_part", [Slot(out), Slot(lse)], 1)
        shape = torch.Size((batch, heads, places * queries, features + 1))
        parts = Spec.of(spec.mesh, _whole_sequence(spec.placements), shape, None, wide(spec.dtype))
        part = self.back(part, parts, "parts")
        out, lse = self.local("dtorch.attention_merge", [Slot(part), places], 2)
        return out, lse

    def cut(self, slot: int, spec: Spec, kind: str) -> int:
        """Bring what `merged` gave to ``spec``: no device lacks anything of that."""
        held = spec.with_placements(_whole_sequence(spec.placements))
        return slot if held is spec else self.builder.reshard(slot, held, spec)

    def _rearranged(self, slot: int, spec: Spec, kind: str, back: bool) -> int:
        a = self.attention
        if is_needless(a.mesh, kind, back, spec.placements, a.roles, a.is_causal, a.sizes, tuple(spec.shape)):
            return slot
        out = self.builder.slot()
        self.builder.body.append(
            Rearrange(
                slot,
                out,
                mesh_id(a.mesh),
                kind,
                back,
                tuple(encode(spec.placements)),
                a.roles,
                a.is_causal,
                self.builder.shape((*a.sizes, *spec.shape)),
                dtype_name(spec.dtype),
                order_or_none(spec) if back else None,
            )
        )
        return out

    def options(self, has_mask: bool, has_keep: bool, slots: list[int]) -> Any:
        """``f(step)``: the arguments that every block function takes last."""
        a = self.attention
        mask = Slot(slots[0]) if has_mask else None
        keep = Slot(slots[-1]) if has_keep else None
        roles: Arg = [list(axes) for axes in (a.roles.batch, a.roles.heads, a.roles.ring, a.roles.keys)]
        sizes = self.builder.operand(list(a.sizes))
        dropout: list[Arg] = [DROPOUT, KEY] if a.has_dropout else [0.0, None]
        return lambda step: [roles, sizes, a.is_causal, step, SCALE, mask, *dropout, keep]

    def local(self, name: str, args: list[Any], count: int) -> list[int]:
        """Write a device function of ``count`` results; their slots."""
        outs = [self.builder.slot() for _ in range(count)]
        self.builder.body.append(Local(name, args, {}, list(outs)))
        return outs

    def start(self, slot: int, spec: Spec) -> None:
        """Begin to hand on a block of a tensor like keys, all of which ``spec`` is."""
        a = self.attention
        blocks = [
            sum(
                math.prod(box_shape(box))
                for box in boxes("key", a.roles, a.is_causal, a.sizes, a.mesh.shape, place, spec.shape)
            )
            for place in itertools.product(*map(range, a.mesh.shape))
        ]
        nbytes = self.builder.operand([max(blocks) * spec.dtype.itemsize, sum(blocks) * spec.dtype.itemsize])
        self.builder.body.append(ShiftStart(slot, mesh_id(a.mesh), a.roles.ring, dtype_name(spec.dtype), nbytes))

    def done(self, dtype: torch.dtype) -> int:
        a = self.attention
        slot = self.builder.slot()
        self.builder.body.append(ShiftDone(slot, mesh_id(a.mesh), a.roles.ring, dtype_name(dtype)))
        return slot


def _whole_sequence(placements: PlacementList) -> PlacementList:
    return PlacementList(REPLICATE if is_shard(p) and p.dim == SEQUENCE else p for p in placements)  # type: ignore[attr-defined]


def _slot(slot: int | None) -> Slot | None:
    return None if slot is None else Slot(slot)


def _summed(spec: Spec) -> Spec:
    """``spec`` without pending sums."""
    return spec.with_placements(boxed(spec.placements))


def _stride(shape: torch.Size, order: list[int]) -> tuple[int, ...]:
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)
