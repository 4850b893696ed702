"""Overlap: what a redistribution needs is computed first and shown to the others at once, and theirs is fetched where it is needed.

A worker that comes to a redistribution waits for the slowest of the others. Shown early, each part is there when it is asked for, and what
is computed in between hides the wait: in a backward, the gradients of weights while those of the activations are added up. Shared memory
moves nothing by itself, so it is only waiting that is hidden.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable

from ..mesh import DeviceMesh
from ..placement import decode
from ..sharding.transfer import kind
from .effects import effects, memory_of
from .ir import Communication, Local, Program, Reshard, ReshardDone, ReshardStart, outs_of, slots_of
from .rewrite import Rewriter, Rewritten

#: Instructions before a redistribution that may be put behind its start.
WINDOW = 32
#: Redistributions under way at a time. Their number with one reader must stay below `LARGE_CREDIT` (`dtorch/worker/comm`).
UNDER_WAY = 3


def overlap(program: Program, mesh_of: Callable[[int], DeviceMesh]) -> Rewritten:
    """``program`` with redistributions in halves. ``mesh_of``: the mesh of a number."""
    return _Overlap(program, mesh_of).rewritten()


@dataclasses.dataclass(slots=True)
class _Begun:
    """A redistribution that has begun; ``hides``: something has been computed since."""

    move: Reshard
    index: int
    hides: bool = False


class _Overlap:
    def __init__(self, program: Program, mesh_of: Callable[[int], DeviceMesh]) -> None:
        self._program = program
        self._mesh_of = mesh_of
        self._memory = memory_of(program)
        #: What each redistribution is; those that send nothing are like other instructions.
        self._kinds = {
            index: what
            for index, one in enumerate(program.body)
            if isinstance(one, Reshard) and (what := self._kind(one)) != "local"
        }

    def rewritten(self) -> Rewritten:
        order = self._order()
        halved = {index for index, what in self._kinds.items() if self._fits(index, what)}
        while True:  # those that would hide nothing stay whole, which ends what is under way there
            hiding: set[int] = set()
            found = self._written(order, halved, hiding)
            if hiding == halved:
                return found
            halved &= hiding

    def _kind(self, move: Reshard) -> str | None:
        """None where each run has a shape of its own."""
        shape = self._program.constant(move.shape)
        source, target = decode(move.source_placements), decode(move.target_placements)
        meshes = self._mesh_of(move.source_mesh), self._mesh_of(move.target_mesh)
        return None if shape is None else kind(meshes[0], source, meshes[1], target, tuple(shape))

    def _fits(self, index: int, what: str | None) -> bool:
        """Whether a redistribution may begin before it ends."""
        move = self._program.body[index]
        assert isinstance(move, Reshard)
        mesh = self._mesh_of(move.source_mesh)
        pending = [n for n, code in zip(mesh.shape, move.source_placements, strict=True) if type(code) is str]
        # An all-reduce of many is made in shares, which takes all of them at once.
        shared_out = what == "all_reduce" and math.prod(pending) > 2
        return mesh.device_type == "cpu" and what not in (None, "transfer") and not shared_out

    def _communicates(self, index: int) -> bool:
        instruction = self._program.body[index]
        return index in self._kinds or (isinstance(instruction, Communication) and not isinstance(instruction, Reshard))

    def _order(self) -> list[int]:
        """The instructions, those that a redistribution stands on before others of its window."""
        body = self._program.body
        order: list[int] = []
        for index, instruction in enumerate(body):
            order.append(index)
            if index not in self._kinds:
                continue
            assert isinstance(instruction, Reshard)
            needed, roots = set(slots_of(instruction)), set(self._memory.roots[instruction.source])
            first: list[int] = [index]
            later: list[int] = []
            at = len(order) - 1
            while at and len(order) - at <= WINDOW:
                one = order[at - 1]
                if self._communicates(one) or self._is_barrier(one):
                    break
                writes = self._memory.written[one]
                if writes & roots or (writes and needed & set(outs_of(body[one]))):
                    break
                if needed & set(outs_of(body[one])):
                    needed |= set(slots_of(body[one]))
                    roots |= {root for slot in slots_of(body[one]) for root in self._memory.roots[slot]}
                    first.append(one)
                else:
                    later.append(one)
                at -= 1
            if any(self._is_work(one) for one in later):
                order[at:] = [*reversed(first), *reversed(later)]
        return order

    def _written(self, order: list[int], halved: set[int], hiding: set[int]) -> Rewritten:
        """The program in this order, with these redistributions in halves; those that hide something are added to ``hiding``."""
        rewriter = Rewriter(self._program)
        begun: deque[_Begun] = deque()

        def end(count: int) -> None:
            for _ in range(count):
                one = begun.popleft()
                rewriter.emit(ReshardDone(one.move), one.index)
                if one.hides:
                    hiding.add(one.index)

        for index in order:
            instruction = self._program.body[index]
            used = set(slots_of(instruction))
            last = max((n for n, one in enumerate(begun, 1) if self._must_end(one, used, index)), default=0)
            end(last)
            if index in halved:
                end(len(begun) - UNDER_WAY + 1)
                assert isinstance(instruction, Reshard)
                rewriter.emit(ReshardStart(instruction), index)
                begun.append(_Begun(instruction, index))
                continue
            if self._communicates(index):
                end(len(begun))
            rewriter.emit(instruction, index)
            if self._is_work(index):
                for one in begun:
                    one.hides = True
        end(len(begun))
        return rewriter.done()

    def _must_end(self, one: _Begun, used: set[int], index: int) -> bool:
        """Whether it must have ended before instruction ``index``, which uses ``used``."""
        written = self._memory.written[index]
        return one.move.out in used or self._is_barrier(index) or bool(written & self._memory.roots[one.move.source])

    def _is_barrier(self, index: int) -> bool:
        """Whether nobody knows what it writes."""
        instruction = self._program.body[index]
        return isinstance(instruction, Local) and not instruction.outs

    def _is_work(self, index: int) -> bool:
        """Whether it takes time: no view, and nothing that moves."""
        instruction = self._program.body[index]
        if isinstance(instruction, Communication):
            return False
        return bool(self._memory.written[index]) or not effects(instruction, {})[1]
