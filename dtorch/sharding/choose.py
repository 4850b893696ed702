"""Choose one legal strategy per mesh axis by the bytes it would move.

The cost of an axis is what each device sends along it to bring the inputs from where they are, plus what a newly pending
sum will cost when it is completed. Computing is taken as free, so ties go to the strategy that moves nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from ..placement import REPLICATE, Placement, PlacementList, is_packed, is_partial, is_shard, is_split
from . import packing
from .rules import rule_for
from .spec import Spec, replicated
from .strategy import Call, Group, RuleEntry, Strategy

#: What one more collective costs, in bytes: below this, one all-reduce beats a reduce-scatter now and an all-gather later.
LATENCY = 64 * 1024

#: How many combinations over the axes are tried before falling back to replicating everything.
ATTEMPTS = 200


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
        problem = _Problem.of_call(call, specs, self._strategies, {})
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
        problems = [_Problem.of_group(call, specs, group, keep) for group in found]  # type: ignore[arg-type]
    else:
        problems = [_Problem.of_call(call, specs, found, keep)]  # type: ignore[arg-type]
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


class _Problem:
    """The choice for one set of tensors that are placed together: a whole call, or one index of a list op."""

    __slots__ = (
        "inputs",
        "outputs",
        "strategies",
        "keep",
        "specs",
        "call",
        "mesh_shape",
        "gathered",
        "free",
        "attempts",
    )

    def __init__(
        self,
        call: Call,
        specs: Sequence[Spec],
        inputs: Sequence[int],
        outputs: Sequence[int],
        strategies: Sequence[Strategy],
        keep: Mapping[int, int | None],
    ) -> None:
        """``specs`` are those of ``inputs`` only; ``keep`` counts within ``inputs`` and ``outputs``."""
        self.call = call
        self.specs = specs
        self.inputs = inputs
        self.outputs = outputs
        self.strategies = strategies
        self.keep = keep
        self.mesh_shape = specs[0].mesh.shape
        self.gathered = self.free = False
        self.attempts = ATTEMPTS

    @staticmethod
    def of_call(
        call: Call, specs: Sequence[Spec], strategies: list[Strategy], keep: Mapping[int, int | None]
    ) -> _Problem:
        return _Problem(call, specs, range(len(specs)), range(len(call.outputs)), strategies, keep)

    @staticmethod
    def of_group(call: Call, specs: Sequence[Spec], group: Group, keep: Mapping[int, int | None]) -> _Problem:
        mine = {}
        for position, i in enumerate(group.inputs):
            if i in keep:
                aliased = keep[i]
                mine[position] = group.outputs.index(aliased) if aliased in group.outputs else None
        return _Problem(call, [specs[i] for i in group.inputs], group.inputs, group.outputs, group.strategies, mine)

    def solve(self) -> list[Strategy] | None:
        """One strategy per axis, or None if ``keep`` allows none."""
        nothing = self.nothing()
        free = self._free(nothing)
        if free is not None:
            self.free = True
            return free
        choices = [[r[-1] for r in self.ranked(axis, nothing)] for axis in range(len(self.mesh_shape))]
        chosen = next(self._search(choices, []), None)
        if chosen is not None:
            for axis, strategy in enumerate(chosen):
                if strategy is nothing and any(spec.placements[axis] is not REPLICATE for spec in self.specs):
                    others = (s for s in choices[axis] if s is not nothing)
                    if not any(self.is_legal([*chosen[:axis], s, *chosen[axis + 1 :]]) for s in others):
                        self.gathered = True
        return chosen

    def nothing(self) -> Strategy:
        """Everything replicated, which is always legal."""
        outputs = [None if self.call.outputs[o] is None else REPLICATE for o in self.outputs]
        return Strategy((REPLICATE,) * len(self.inputs), tuple(outputs))

    def ranked(self, axis: int, nothing: Strategy) -> list[tuple[float, int, int, int, Strategy]]:
        """The strategies that ``keep`` allows along an axis, the cheapest first: each behind its cost, the inputs that it moves,
        the outputs that it leaves whole, and a number of its own."""
        here = [spec.placements[axis] for spec in self.specs]
        if all(p is REPLICATE for p in here):
            return [(0.0, 0, 0, -1, nothing)]
        held = [_held(spec, axis) for spec in self.specs]
        pending = any(map(is_partial, here))
        found = []
        for order, strategy in enumerate((*self.strategies, nothing)):
            if not self.keep or self._keeps(strategy, here):
                cost, moves = self._cost(strategy, axis, here, held, pending)
                found.append((cost, moves, sum([p is REPLICATE for p in strategy.outputs]), order, strategy))
        found.sort()
        return found

    def _free(self, nothing: Strategy) -> list[Strategy] | None:
        """The choice where each axis has just one strategy that moves nothing, and that costs nothing: no other need be weighed."""
        chosen = []
        for axis in range(len(self.mesh_shape)):
            here = [spec.placements[axis] for spec in self.specs]
            if all(p is REPLICATE for p in here):
                chosen.append(nothing)
                continue
            fits = [s for s in self.strategies if all(a is b for a, b in zip(s.inputs, here, strict=True))]
            if (
                len(fits) != 1
                or not self._keeps(fits[0], here)
                or self._cost(fits[0], axis, here, (), any(map(is_partial, here)))[0]
            ):
                return None
            chosen.append(fits[0])
        return chosen if self.is_legal(chosen) else None

    def _search(self, choices: list[list[Strategy]], chosen: list[Strategy]) -> Iterator[list[Strategy]]:
        if len(chosen) == len(choices):
            yield chosen
            return
        for strategy in choices[len(chosen)]:
            self.attempts -= 1
            if self.attempts < 0:
                return
            longer = [*chosen, strategy]
            if self.is_legal(longer):
                yield from self._search(choices, longer)

    def _keeps(self, strategy: Strategy, here: list[Placement]) -> bool:
        for i, o in self.keep.items():
            if strategy.inputs[i] is not here[i]:
                return False
            # What finishing returns is a new tensor, so it cannot be the one that was written.
            if o is not None and (strategy.outputs[o] is not here[i] or strategy.finish is not None):
                return False
        return True

    def is_legal(self, chosen: list[Strategy]) -> bool:
        return legal(chosen, [spec.shape for spec in self.specs], self.mesh_shape)

    def _cost(
        self, strategy: Strategy, axis: int, here: list[Placement], held: Sequence[float], pending: bool
    ) -> tuple[float, int]:
        """What a strategy costs along an axis, and how many of its inputs move.

        Args:
            held: `_held` of each input, asked for those that move.
            pending: some input is a pending sum.
        """
        pieces = self.mesh_shape[axis]
        share = (pieces - 1) / pieces
        cost, moves = 0.0, 0
        for i, (source, target) in enumerate(zip(here, strategy.inputs, strict=True)):
            if source is target:
                continue
            moves += 1
            if source is REPLICATE:
                continue
            size = held[i] * share
            cost += LATENCY
            if target is REPLICATE:
                cost += 2 * size if is_partial(source) else size
            elif is_shard(target):
                # An uneven split sends padding and gives some devices more than their part of the work.
                dim = self.specs[i].shape[target.dim]  # type: ignore[attr-defined]
                waste = -(-dim // pieces) * pieces / dim if dim else 1.0
                # What is scattered anew is likely to be gathered later, so where latency counts it is made whole at once: one
                # all-reduce for a reduce-scatter and an all-gather, and tokens picked from split logits come out whole.
                cost += LATENCY + (size * waste if is_partial(source) else size * waste / pieces)
            else:
                # Making a pending sum out of a shard only to add zeros elsewhere.
                cost += size + LATENCY
        for o, placement in zip(self.outputs, strategy.outputs, strict=True):
            if placement is not None and is_partial(placement):
                out = self.call.outputs[o]
                size = math.prod(out.shape) * out.dtype.itemsize * share  # type: ignore[union-attr]
                if strategy.finish is not None or placement.reduce_op != "sum":  # type: ignore[attr-defined]
                    cost += 2 * size + LATENCY
                elif not pending:
                    cost += size + LATENCY
        return cost, moves


def legal(chosen: Sequence[Strategy], shapes: Sequence[Sequence[int]], mesh_shape: Sequence[int]) -> bool:
    """Whether the strategies of the first axes may stand together, for inputs of these global shapes."""
    local = finish = None
    for strategy in chosen:
        if strategy.local is not None:
            if local is not None and local != strategy.local:
                return False
            local = strategy.local
        if strategy.finish is not None:
            if finish is not None and finish != strategy.finish:
                return False
            finish = strategy.finish
    for strategy in chosen:
        for o, placement in enumerate(strategy.outputs):
            if placement is not None and is_packed(placement):  # which no other axis may split
                splits = [p for s in chosen if (p := s.outputs[o]) is not None and is_split(p)]
                if sum(p.dim == placement.dim for p in splits) > 1:  # type: ignore[attr-defined]
                    return False
        if strategy.even is None and not strategy.nonempty:
            continue
        for i, placement in enumerate(strategy.inputs):
            if not is_split(placement):
                continue
            dim = placement.dim  # type: ignore[attr-defined]
            axes = [
                n for s, n in zip(chosen, mesh_shape, strict=False) if is_split(s.inputs[i]) and s.inputs[i].dim == dim
            ]  # type: ignore[attr-defined]
            if is_packed(placement) and len(axes) > 1:
                return False
            if strategy.even is not None and strategy.even % math.prod(axes):
                return False
            if strategy.nonempty and not _all_filled(shapes[i][dim], axes):
                return False
    return True


def _held(spec: Spec, axis: int) -> float:
    """The bytes a device would hold if ``spec`` were whole along ``axis``."""
    size = float(spec.nbytes)
    for other, (pieces, placement) in enumerate(zip(spec.mesh.shape, spec.placements, strict=True)):
        if other != axis and is_split(placement):
            size /= pieces
    return size


def _all_filled(size: int, axes: Sequence[int]) -> bool:
    """Whether splitting ``size`` by each of ``axes`` in turn, as torch.chunk does, leaves no empty piece."""
    sizes = {size}
    for pieces in axes:
        smaller = set()
        for held in sizes:
            step = -(-held // pieces)
            last = held - step * (pieces - 1)
            if last <= 0:
                return False
            smaller |= {step, last}
        sizes = smaller
    return 0 not in sizes
