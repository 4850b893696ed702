"""Reuse: what a program has computed or moved before it takes from there (common-subexpression elimination).

Two instructions that do the same to the same values become one, if nothing has written to what they read in between, and nothing ever
writes to what they make; of values that the program returns no two become one, for whoever gets them may write to one. A value is not
kept for long for that, which would raise the peak: what a checkpoint computes again, or a weight gathered again for the backward, stays.

A redistribution may also take less than it did from what an earlier one made of the same value: nothing is sent for a shard of what is
there whole, and a sum that is there in shards is gathered.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import torch

from .effects import memory_of, op_called
from .ir import Instruction, Op, Operand, Program, Rearrange, Reshard, outs_of, slots_of
from .rewrite import Rewriter, Rewritten, renamed

#: Instructions that a value is kept for after its last use, so that what is computed again within them need not be.
REACH = 16


def reuse(program: Program) -> Rewritten:
    """``program`` without what it does twice."""
    return _Reuse(program).rewritten()


class _Reuse:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._rewriter = Rewriter(program)
        memory = memory_of(program)
        self._roots, self._written = memory.roots, memory.written
        self._ever_written = frozenset().union(*memory.written)
        self._outputs = frozenset(program.outputs)
        #: The roots of what is returned.
        self._returned = set().union(*(memory.roots[slot] for slot in program.outputs))
        #: For each slot, the last instruction that uses it.
        self._last = {slot: index for index, one in enumerate(program.body) for slot in (*outs_of(one), *slots_of(one))}
        #: The slot that stands for another.
        self._same: dict[int, int] = {}
        #: How often each root has been written so far.
        self._writes: dict[int, int] = defaultdict(int)

    def rewritten(self) -> Rewritten:
        made: dict[bytes, list[int]] = {}
        moved: dict[bytes, list[Reshard]] = defaultdict(list)
        for index, instruction in enumerate(self._program.body):
            instruction = renamed(instruction, lambda slot: self._same.get(slot, slot), Operand)
            if _is_repeatable(instruction):
                key = self._key(msgspec.structs.replace(instruction, **_NAMELESS[type(instruction)]), instruction)
                outs = outs_of(instruction)
                if self._stands_for(made.get(key), outs, index):
                    continue
                made[key] = outs
                if isinstance(instruction, Reshard):
                    source = self._key(_source_alone(instruction), instruction)
                    instruction = self._cheaper(instruction, moved[source], index)
                    moved[source].append(instruction)
            self._rewriter.emit(instruction, index)
            for root in self._written[index]:
                self._writes[root] += 1
        return self._rewriter.done([self._same.get(slot, slot) for slot in self._program.outputs])

    def _key(self, what: Instruction, of: Instruction) -> bytes:
        """``what``, and in what state its inputs are."""
        written = [sum(self._writes[root] for root in self._roots[slot]) for slot in slots_of(of)]
        return msgspec.msgpack.encode([what, written])

    def _stands_for(self, earlier: list[int] | None, outs: list[int], index: int) -> bool:
        """Whether the slots ``earlier`` can stand for ``outs`` from instruction ``index`` on; then they do."""
        if earlier is None or [out < 0 for out in earlier] != [out < 0 for out in outs]:
            return False
        pairs = [(one, other) for one, other in zip(earlier, outs, strict=True) if other >= 0]
        both = {slot for pair in pairs for slot in pair}
        if both & self._ever_written or any(pair[0] in self._returned and pair[1] in self._returned for pair in pairs):
            return False
        if index - max(self._last_use(one) for one, _ in pairs) > REACH:
            return False
        for one, other in pairs:
            self._same[other] = one
            self._last[one] = max(self._last[one], self._last[other])
            if other in self._returned:
                self._returned.add(one)
        return True

    def _last_use(self, slot: int) -> int:
        return len(self._program.body) if slot in self._outputs else self._last[slot]

    def _cheaper(self, move: Reshard, before: list[Reshard], index: int) -> Reshard:
        """``move`` from what an earlier one made, which is still there, if less has to be sent so."""
        for earlier in before:
            if (
                earlier.target_mesh == move.source_mesh == move.target_mesh
                and earlier.out not in self._ever_written
                and self._last_use(earlier.out) >= index
                and _is_less(move.source_placements, earlier.target_placements, move.target_placements)
            ):
                self._last[earlier.out] = max(self._last[earlier.out], index)
                return msgspec.structs.replace(move, source=earlier.out, source_placements=earlier.target_placements)
        return move


#: What makes two instructions differ though they do the same.
_NAMELESS: dict[type, dict] = {Op: {"outs": []}, Reshard: {"out": -1}, Rearrange: {"out": -1}}


def _is_repeatable(instruction: Instruction) -> bool:
    """Whether it does the same each time: torch's own ops, but for random ones, and what moves. Of others nobody has promised it."""
    if not isinstance(instruction, Op):
        return isinstance(instruction, (Reshard, Rearrange))
    op = op_called(instruction.name)
    return (
        op is not None
        and op.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not op._schema.is_mutable
        and any(out >= 0 for out in instruction.outs)
    )


def _source_alone(move: Reshard) -> Reshard:
    return msgspec.structs.replace(move, out=-1, target_mesh=-1, target_placements=(), order=None)


def _is_less(source: tuple, earlier: tuple, target: tuple) -> bool:
    """Whether it is less to send from placements ``earlier`` than from ``source``, to ``target``."""
    moves = [(a, b, c) for a, b, c in zip(source, earlier, target, strict=True) if b != c]
    # To what is whole everywhere any placement is a part; shards of a sum are half way to all of it.
    parts = all(b == -1 for _, b, _ in moves)
    shards = all(_is_shard(b) and c == -1 and not _is_shard(a) and a != -1 for a, b, c in moves)
    return parts or shards


def _is_shard(code: int | str) -> bool:
    return type(code) is int and code >= 0
