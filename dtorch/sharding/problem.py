"""The placements of one set of tensors: which strategies may stand together, and which moves the fewest bytes.

The cost of an axis is what each device sends along it to bring the inputs from where they are, plus what a newly pending
sum will cost when it is completed. Computing is taken as free, so ties go to the strategy that moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..placement import REPLICATE, Placement, is_packed, is_partial, is_shard, is_split
from .spec import Spec
from .strategy import Call, Group, Strategy

#: What one more collective costs, in bytes: below this, one all-reduce beats a reduce-scatter now and an all-gather later.
LATENCY = 64 * 1024

#: How many combinations over the axes are tried before falling back to replicating everything.
ATTEMPTS = 200


class Problem:
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
    ) -> Problem:
        return Problem(call, specs, range(len(specs)), range(len(call.outputs)), strategies, keep)

    @staticmethod
    def of_group(call: Call, specs: Sequence[Spec], group: Group, keep: Mapping[int, int | None]) -> Problem:
        mine = {}
        for position, i in enumerate(group.inputs):
            if i in keep:
                aliased = keep[i]
                mine[position] = group.outputs.index(aliased) if aliased in group.outputs else None
        return Problem(call, [specs[i] for i in group.inputs], group.inputs, group.outputs, group.strategies, mine)

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
