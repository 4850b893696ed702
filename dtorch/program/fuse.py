"""Fusion: ops of a captured program that follow each other and only compute become one instruction, for a compiler on the workers.

What joins depends on nothing but its inputs and touches no memory but its own: no writes, no random numbers, no numbers that each
run says. A result that is a view is taken outside, of a result that is not, so that what shares memory still does.
"""

from __future__ import annotations

from typing import Any

import torch

from .effects import effects, op_called
from .ir import Fused, Instruction, LocalShape, Op, Operand, Program, outs_of, slots_of
from .rewrite import Rewriter, Rewritten, renamed

aten = torch.ops.aten

#: So many ops that are no views are worth a compiler's time.
FEWEST = 2
#: Composites whose results are new though no schema says so.
_NEW = {aten.linear.default, aten.matmul.default}
_UNFIT = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def fuse(program: Program) -> Rewritten:
    """``program`` with such ops in `Fused` instructions."""
    rewriter = Rewriter(program)
    last_use = {slot: index for index, instruction in enumerate(program.body) for slot in slots_of(instruction)}
    last_use.update(dict.fromkeys(program.outputs, len(program.body)))
    run: list[int] = []

    def close() -> None:
        _emit(program, run, last_use, rewriter)
        run.clear()

    for index, instruction in enumerate(program.body):
        if _only_computes(program, instruction):
            run.append(index)
        else:
            close()
            rewriter.emit(instruction, index)
    close()
    return rewriter.done()


def _emit(program: Program, run: list[int], last_use: dict[int, int], rewriter: Rewriter) -> None:
    """Emit the instructions ``run``: one that is compiled, then the views of its results."""
    body = program.body
    made = {out for index in run for out in outs_of(body[index]) if out >= 0}
    kept = {slot for slot in made if last_use.get(slot, -1) > run[-1]}
    views: list[int] = []
    for index in reversed(run):
        if _is_view(body[index]) and kept.intersection(outs_of(body[index])):
            views.insert(0, index)
            kept -= set(outs_of(body[index]))
            kept |= made.intersection(slots_of(body[index]))
    live = set(kept)
    joined: list[int] = []
    for index in reversed(run):
        if live.intersection(outs_of(body[index])):
            joined.insert(0, index)
            live |= set(slots_of(body[index]))
    if sum(not _is_view(body[index]) for index in joined) < FEWEST:
        for index in run:
            rewriter.emit(body[index], index)
        return
    rewriter.emit(_fused([body[index] for index in joined], kept), joined[0])  # type: ignore[misc]
    for index in views:
        rewriter.emit(body[index], index)


def _fused(ops: list[Op], kept: set[int]) -> Fused:
    made = {out for op in ops for out in op.outs if out >= 0}
    inputs = list(dict.fromkeys(slot for op in ops for slot in slots_of(op) if slot not in made))
    place = {slot: index for index, slot in enumerate(inputs)}
    for op in ops:
        for out in op.outs:
            if out >= 0:
                place[out] = len(place)
    outs = [out for op in ops for out in op.outs if out in kept]
    return Fused(inputs, [renamed(op, place.__getitem__, Operand) for op in ops], [place[out] for out in outs], outs)  # type: ignore[misc]


def _only_computes(program: Program, instruction: Instruction) -> bool:
    if not isinstance(instruction, Op) or not instruction.name.startswith("aten."):
        return False
    op = op_called(instruction.name)
    if op is None or _UNFIT.intersection(op.tags) or any(str(r.type) != "Tensor" for r in op._schema.returns):
        return False
    written, viewed = effects(instruction, {})
    if written or (viewed and op not in _NEW and not any(r.alias_info is not None for r in op._schema.returns)):
        return False
    return not _varies(program, [*instruction.args, *instruction.kwargs.values()])


def _is_view(instruction: Instruction) -> bool:
    return isinstance(instruction, Op) and op_called(instruction.name) not in _NEW and bool(effects(instruction, {})[1])


def _varies(program: Program, value: Any) -> bool:
    """Whether a run says what is in it."""
    if isinstance(value, list):
        return any(_varies(program, item) for item in value)
    if isinstance(value, LocalShape):
        value = value.shape
    return isinstance(value, Operand) and value.index < program.operands
