"""A program as people read it: one line an instruction."""

from __future__ import annotations

from typing import Any

from ..placement import decode
from .ir import (
    Const,
    Fused,
    Instruction,
    Layout,
    Local,
    LocalShape,
    Op,
    Operand,
    Program,
    Rearrange,
    Reshard,
    ReshardDone,
    ReshardStart,
    ShiftStart,
    Slot,
)


def lines_of(program: Program) -> list[str]:
    """A line for each instruction: ``%3 = aten.mm.default(%0, %1)``. What each run says is ``$0``, ``$1``, …"""
    return [_line(program, instruction) for instruction in program.body]


def _line(program: Program, instruction: Instruction) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, Slot):
            return f"%{value.index}"
        if isinstance(value, Operand):
            if value.index < program.operands:
                return f"${value.index}"
            return repr(program.constant(value))
        if isinstance(value, Const):
            return value.value or value.kind
        if isinstance(value, (LocalShape, Layout)):
            return f"{_placements(value.placements)} of {shown(value.shape)}"
        if isinstance(value, list):
            return "[" + ", ".join(map(shown, value)) + "]"
        return repr(value)

    if isinstance(instruction, (Op, Local)):
        arguments = [*map(shown, instruction.args), *(f"{k}={shown(v)}" for k, v in instruction.kwargs.items())]
        text = f"{instruction.name}({', '.join(arguments)})"
        outs = ", ".join("_" if out < 0 else f"%{out}" for out in instruction.outs)
        if isinstance(instruction, Local) and instruction.outputs:
            text += f" as {', '.join(map(shown, instruction.outputs))}"
        return text if not any(out >= 0 for out in instruction.outs) else f"{outs} = {text}"
    if isinstance(instruction, Fused):
        inputs, outs = (", ".join(f"%{slot}" for slot in slots) for slots in (instruction.inputs, instruction.outs))
        return f"{outs} = compiled({inputs}): {', '.join(op.name for op in instruction.body)}"
    if isinstance(instruction, ReshardStart):
        if isinstance(instruction, ReshardDone):
            return f"%{instruction.move.out} = redistribute(%{instruction.move.source}): done"
        return _line(program, instruction.move).partition(" = ")[2] + ": begin"
    if isinstance(instruction, Reshard):
        source, target = _placements(instruction.source_placements), _placements(instruction.target_placements)
        meshes = ""
        if instruction.source_mesh != instruction.target_mesh:
            meshes = f", mesh {instruction.source_mesh} → {instruction.target_mesh}"
        return (
            f"%{instruction.out} = redistribute(%{instruction.source}: {source} → {target}{meshes}) "
            f"of {shown(instruction.shape)} {instruction.dtype}"
        )
    if isinstance(instruction, Rearrange):
        way = "back" if instruction.back else "to the attention"
        return f"%{instruction.out} = rearrange(%{instruction.source}, {instruction.kind}, {way})"
    if isinstance(instruction, ShiftStart):
        return f"shift %{instruction.source} along axes {list(instruction.axes)}: begin"
    return f"%{instruction.out} = shift along axes {list(instruction.axes)}: done"


def _placements(codes: Any) -> str:
    return "[" + ", ".join(map(str, decode(codes))) + "]"
