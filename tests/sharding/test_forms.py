"""A plan that serves its form is the one that planning anew gives, for whatever other sizes have that form."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import PARTIAL, REPLICATE, shard
from dtorch.sharding.choose import Weighed, choose
from dtorch.sharding.forms import form_of, resized, serves_its_form
from dtorch.sharding.plan import decide, describe, plan_op, write_plan
from dtorch.sharding.rules import rule_for
from dtorch.sharding.schema import OpInfo
from dtorch.sharding.spec import Spec
from dtorch.sharding.strategy import Call, TensorArg

from .ground_truth import Sample, call_of, run_whole, strategies_of, tree
from .test_rules import captured, written

MESHES = (DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]]))


def specs_of(sample: Sample, mesh: DeviceMesh, placements: list) -> list[Spec]:
    found: list[Spec] = []
    tree(
        (sample.args, sample.kwargs),
        lambda t: found.append(Spec.of(mesh, placements[len(found)], t.shape, t.stride(), t.dtype)),
    )
    return found


def larger(sample: Sample, specs: list[Spec]) -> Sample:
    """The sample with every size grown, but 0, 1 and, where the rule asks for them, those of sharded dims."""
    fixed = {0, 1}
    if rule_for(sample.op).by_shards:
        fixed |= {s.shape[p.dim] for s in specs for p in s.placements if p.is_shard()}

    def grow(t: torch.Tensor) -> torch.Tensor:
        order = sorted(range(t.ndim), key=lambda d: (-t.stride(d), d))
        sizes = [n if n in fixed else 2 * n + 3 for n in t.shape]
        empty = torch.zeros([sizes[d] for d in order], dtype=t.dtype)
        return empty.permute([order.index(d) for d in range(t.ndim)])

    return dataclasses.replace(sample, args=tree(sample.args, grow), kwargs=tree(sample.kwargs, grow))


def test_served_plans_are_what_planning_gives() -> None:
    served = 0
    ops = set()
    for sample in (*written(), *captured()):
        info = OpInfo(sample.op)
        if not info.by_form or info.outs:
            continue
        call = call_of(sample, run_whole(sample)[0])
        for mesh in MESHES:
            for strategy in strategies_of(call):
                specs = specs_of(sample, mesh, [[p] * mesh.ndim for p in strategy.inputs])
                known = describe(info, call.args, call.kwargs, specs)
                plan = write_plan(decide(info, known, specs), specs)
                if not serves_its_form(plan):
                    continue
                other = larger(sample, specs)
                others = specs_of(other, mesh, [s.placements for s in specs])
                again = call_of(other, [])
                try:
                    grown = describe(info, again.args, again.kwargs, others)
                except Exception:
                    continue  # sizes that torch does not take together
                if form_of(info, known, specs) != form_of(info, grown, others):
                    continue
                fresh = plan_op(info, again.args, again.kwargs, others)
                assert resized(info, plan, grown) == fresh, (sample, mesh, strategy)
                served += 1
                ops.add(sample.op)
    assert served > 1000
    assert len(ops) > 150


def test_what_is_weighed_anew_is_what_choosing_gives() -> None:
    """Of inputs under any placements, so that they move, in sizes where now latency counts and now bytes."""
    rng = random.Random(0)
    weighed, ops, decisions = 0, set(), set()
    for sample in (*written(), *captured()):
        info = OpInfo(sample.op)
        if not info.by_form or info.outs or info.is_mutable:
            continue
        call = call_of(sample, run_whole(sample)[0])
        for mesh in MESHES:
            placements = [
                [rng.choice([REPLICATE, PARTIAL, *map(shard, range(t.ndim))]) for _ in range(mesh.ndim)]
                for t in call.inputs
            ]
            known = specs_of(sample, mesh, placements)
            first = describe(info, call.args, call.kwargs, known)
            found = Weighed.of(first, known)
            if found is None or choose(first, known).free:
                continue
            for call, specs in [(first, known), *scaled(first, known, (1, 30, 1000, 3)), (first, known)]:
                expected = choose(call, specs)
                assert found.choose(call, specs) == expected, (sample, mesh, placements)
                weighed += 1
                ops.add(sample.op)
                decisions.add((sample.op, mesh, expected.inputs))
    assert weighed > 1000
    assert len(ops) > 100
    assert len(decisions) > 200


def scaled(call: Call, specs: list[Spec], factors: Iterable[int]) -> Iterator[tuple[Call, list[Spec]]]:
    """The call with every size but 0 and 1 multiplied: of the same form."""
    for factor in factors:

        def grow(shape: Sequence[int], factor: int = factor) -> tuple[int, ...]:
            return tuple(n if n < 2 else n * factor for n in shape)

        outputs = tuple(None if o is None else dataclasses.replace(o, shape=grow(o.shape)) for o in call.outputs)
        inputs = tuple(dataclasses.replace(i, shape=grow(i.shape)) for i in call.inputs)

        def grown(value: Any, inputs: Sequence[TensorArg] = inputs) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(grown, value))
            return inputs[value.index] if isinstance(value, TensorArg) else value

        kwargs = {name: grown(value) for name, value in call.kwargs.items()}
        larger = Call(call.op, grown(call.args), kwargs, inputs, outputs)
        yield larger, [Spec.of(s.mesh, s.placements, grow(s.shape), s.stride, s.dtype) for s in specs]


def test_forms_differ_where_plans_may() -> None:
    """An equality of sizes, a size of 1 or 0, an order of strides, a type, a constant; of some ops a sharded size."""
    mesh = MESHES[0]
    split, whole = [shard(0)], [REPLICATE]
    add, cat, softmax = torch.ops.aten.add.Tensor, torch.ops.aten.cat.default, torch.ops.aten._softmax.default
    variance = torch.ops.aten.var.correction

    def form(op, *args, placements=None) -> tuple:
        sample = Sample(op, args, {})
        count = len(call_of(sample, []).inputs)
        specs = specs_of(sample, mesh, placements or [whole] * count)
        call = call_of(sample, [])
        info = infos.setdefault(op, OpInfo(op))
        return form_of(info, describe(info, call.args, call.kwargs, specs), specs)

    infos: dict = {}
    z = torch.zeros
    assert form(add, z(4, 5), z(4, 5)) == form(add, z(6, 7), z(6, 7))
    different = [
        form(add, z(4, 5), z(4, 5)),
        form(add, z(4, 4), z(4, 4)),
        form(add, z(4, 5), z(4, 1)),
        form(add, z(4, 5), z(5)),
        form(add, z(0, 5), z(0, 5)),
        form(add, z(4, 5), z(4, 5), placements=[split, split]),
        form(variance, z(4, 5), [1], placements=[split]),
        form(variance, z(6, 5), [1], placements=[split]),
        form(add, z(5, 4).T, z(5, 4).T),
        form(add, z(4, 5), z(4, 5).double()),
        form(add, z(4, 5), 1),
        form(add, z(4, 5), 1.0),
        form(add, z(4, 5), 2.0),
        form(cat, [z(4, 5), z(4, 5)], 0),
        form(cat, [z(4, 5), z(4, 5)], 1),
        form(softmax, z(4, 5), 0, False),
        form(softmax, z(4, 5), 1, False),
    ]
    assert len(set(different)) == len(different)
    assert form(add, z(4, 5), 2.0) == form(add, z(8, 9), 3.0)
