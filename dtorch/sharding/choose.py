"""Choose one legal strategy per mesh axis by the bytes it would move (`problem`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import torch

from ..placement import REPLICATE, PlacementList
from . import packing
from .problem import Problem
from .rules import rule_for
from .spec import Spec, replicated
from .strategy import Call, Group, RuleEntry, Strategy


@dataclasses.dataclass(slots=True)
class Decision:
    """Where an op runs.

    Args:
        inputs: the placements each input tensor is brought to.
        outputs: the placements of what the op (or ``local``) returns, before ``finish``; None for an output that is no tensor.
            A Partial whose reduction is not ``sum``, and every Partial if there is a ``finish``, must be completed to Replicate.
        local: the device function or op to run in place of the op.
        finish: the device function to run on the completed outputs.
        gathered: a sharded or pending input had to be made whole because no rule allowed anything else.
        keep_failed: the placements to keep cannot be kept; this decision is what is best without keeping them.
        local_shapes: arguments that hold a shape, each with the output whose local shape replaces it.
        free: nothing moves, no other placements were weighed, and the sizes of shards were not asked for unless the rule is `by_shards`.
    """

    inputs: tuple[PlacementList, ...]
    outputs: tuple[PlacementList | None, ...]
    local: str | None = None
    finish: str | None = None
    gathered: bool = False
    keep_failed: bool = False
    local_shapes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    free: bool = False


def choose(call: Call, specs: Sequence[Spec], keep: Collection[int] = ()) -> Decision:
    """The cheapest legal placements for ``call``.

    Args:
        specs: one per entry of ``call.inputs``, all on one mesh.
        keep: inputs that are written in place, so whose placements must stay; an output that aliases one gets the same.
    """
    return _choose(call, specs, _aliased_outputs(call, keep) if keep else {})


class Weighed:
    """The strategies among which calls of one form choose, where the cheapest moves something: only the costs differ with the sizes.

    What a rule gives, and whether strategies may stand together, follows from the form (`RuleEntry.by_form`), so for each set of cheapest
    strategies there is one decision.
    """

    def __init__(self, strategies: list[Strategy]) -> None:
        self._strategies = strategies
        self._decisions: dict[tuple[int, ...], Decision] = {}

    @staticmethod
    def of(call: Call, specs: Sequence[Spec]) -> Weighed | None:
        """For calls of the form of ``call``; None where its choice depends on more."""
        entry = rule_for(call.op)
        if entry is None or not entry.by_form or any(spec.has_packed for spec in specs):
            return None
        found = list(entry.rule(call))
        if not all(type(one) is Strategy and one.even is None and not one.nonempty for one in found):
            return None
        return Weighed(found)  # type: ignore[arg-type]

    def choose(self, call: Call, specs: Sequence[Spec]) -> Decision:
        """`choose` for a call of the form that writes nothing."""
        problem = Problem.of_call(call, specs, self._strategies, {})
        nothing = problem.nothing()
        best = [problem.ranked(axis, nothing)[0] for axis in range(len(problem.mesh_shape))]
        key = tuple([order for _, _, _, order, _ in best])
        decision = self._decisions.get(key)
        if decision is None:
            decision = choose(call, specs)
            if problem.is_legal([strategy for *_, strategy in best]):
                self._decisions[key] = decision
        return decision


def _choose(call: Call, specs: Sequence[Spec], keep: Mapping[int, int | None]) -> Decision:
    mesh = specs[0].mesh
    entry = rule_for(call.op)
    if all(spec.replicated for spec in specs):
        whole = replicated(mesh)
        shapes = _present(call, entry) if entry is not None else {}
        outs = tuple([None if o is None else whole for o in call.outputs])
        return Decision((whole,) * len(specs), outs, local_shapes=shapes, free=True)
    if entry is None:
        return _whole(call, specs, keep, {})
    found = list(entry.rule(call))
    if any(spec.has_packed for spec in specs):
        found = packing.with_packed(call, entry, found, specs)
    if found and type(found[0]) is Group:
        problems = [Problem.of_group(call, specs, group, keep) for group in found]  # type: ignore[arg-type]
    else:
        problems = [Problem.of_call(call, specs, found, keep)]  # type: ignore[arg-type]
    inputs = [[REPLICATE] * len(mesh.shape) for _ in specs]
    outputs = [[REPLICATE] * len(mesh.shape) for _ in call.outputs]
    local = finish = None
    gathered, free = False, True
    # The indices of a list op are often alike, and specs are interned.
    solved: dict[tuple, list[Strategy] | None] = {}
    for problem in problems:
        if len(problems) == 1:
            chosen = problem.solve()
        else:
            key = (*map(id, problem.specs), *problem.keep, tuple(problem.strategies))
            if key not in solved:
                solved[key] = problem.solve()
            chosen = solved[key]
        if chosen is None:
            if problem.keep:
                return dataclasses.replace(_choose(call, specs, {}), keep_failed=True)
            return _whole(call, specs, keep, _present(call, entry))
        for axis, strategy in enumerate(chosen):
            for i, placement in zip(problem.inputs, strategy.inputs, strict=True):
                inputs[i][axis] = placement
            for o, placement in zip(problem.outputs, strategy.outputs, strict=True):
                outputs[o][axis] = placement
            free = free and (entry.by_shards or not (strategy.even or strategy.nonempty))
            local = local or strategy.local
            finish = finish or strategy.finish
        gathered = gathered or problem.gathered
        free = free and problem.free
    if keep and len(problems) > 1 and any(PlacementList(inputs[i]) != specs[i].placements for i in keep):
        return dataclasses.replace(_choose(call, specs, {}), keep_failed=True)
    return Decision(
        tuple(map(PlacementList, inputs)),
        tuple(None if o is None else PlacementList(p) for o, p in zip(call.outputs, outputs, strict=True)),
        local,
        finish,
        gathered,
        False,
        _present(call, entry),
        free,
    )


def _present(call: Call, entry: RuleEntry) -> Mapping[str, int]:
    """The shape arguments whose output there is: a backward may be asked for some of its gradients only."""
    shapes = entry.local_shapes
    return {name: o for name, o in shapes.items() if call.outputs[o] is not None} if shapes else shapes


def _aliased_outputs(call: Call, keep: Collection[int]) -> dict[int, int | None]:
    """For each kept input the output that is the same tensor, or None."""
    found: dict[int, int | None] = dict.fromkeys(keep)
    for name, output in _returned_arguments(call.op):
        value = call.get(name)
        if value is not None and value.index in found:
            found[value.index] = output
    return found


@functools.cache
def _returned_arguments(op: torch._ops.OpOverload) -> tuple[tuple[str, int], ...]:
    """(written argument, the output that is it) pairs of an op's schema."""
    written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    pairs = []
    for output, returned in enumerate(op._schema.returns):
        if returned.alias_info is not None and not isinstance(returned.type, torch.ListType):
            sets = returned.alias_info.before_set | returned.alias_info.after_set
            pairs += [(a.name, output) for a in written if a.alias_info.before_set & sets]
    return tuple(pairs)


def _whole(call: Call, specs: Sequence[Spec], keep: Mapping[int, int | None], shapes: Mapping[str, int]) -> Decision:
    """Everything gathered, the op run replicated."""
    whole = replicated(specs[0].mesh)
    outputs = tuple(None if o is None else whole for o in call.outputs)
    kept = all(specs[i].replicated for i in keep)
    return Decision((whole,) * len(specs), outputs, gathered=True, keep_failed=not kept, local_shapes=shapes)
