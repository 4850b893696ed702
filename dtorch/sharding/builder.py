"""Writing a program: its instructions, and the operands that a run of it is given."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import PlacementList, encode
from ..program.ir import Arg, Const, Instruction, Layout, LocalShape, Op, Operand, Program, Reshard, Slot
from ..raw import dtype_name
from . import packing
from .layout import stride_order
from .schema import OpInfo
from .spec import Spec, mesh_id
from .strategy import TensorArg


class Builder:
    """Writes one program."""

    def __init__(self, mesh: DeviceMesh, inputs: int, numbers: int) -> None:
        self.mesh = mesh
        self.inputs = inputs
        self.slots = inputs
        self.numbers = numbers
        self.operands: list[Any] = []
        self.body: list[Instruction] = []
        self._shapes: dict[tuple[int, ...], Operand] = {}

    def slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def operand(self, value: Any) -> Operand:
        """A fixed operand of the plan; sizes are operands so that programs do not depend on them."""
        self.operands.append(value)
        return Operand(self.numbers + len(self.operands) - 1)

    def shape(self, shape: tuple[int, ...]) -> Operand:
        found = self._shapes.get(shape)
        if found is None:
            found = self._shapes[shape] = self.operand(list(shape))
        return found

    @property
    def names_shapes(self) -> bool:
        """Whether shapes of tensors are among the operands."""
        return bool(self._shapes)

    def reshard(self, source: int, spec: Spec, target: Spec) -> int:
        """Bring the value in slot ``source`` from ``spec`` to ``target``; the slot of the result."""
        if spec.has_packed or target.has_packed:
            return self._reshard_packed(source, spec, target)
        out = self.slot()
        self.body.append(
            Reshard(
                source,
                out,
                mesh_id(spec.mesh),
                tuple(encode(spec.placements)),
                mesh_id(target.mesh),
                tuple(encode(target.placements)),
                self.shape(tuple(spec.shape)),
                dtype_name(spec.dtype),
                order_or_none(spec),
            )
        )
        return out

    def _reshard_packed(self, source: int, spec: Spec, target: Spec) -> int:
        """Under a shape in which the parts of packed dims have a dim of their own; through whole dims where there is none for both ends."""
        fine = packing.unpacked(spec, target)
        if fine is None:
            middle = packing.between(spec, target)
            return self.reshard(self.reshard(source, spec, middle), middle, target)
        opened, closed = self.slot(), self.slot()
        self.op("aten.view.default", [Slot(source), self._local_shape(fine[0])], [opened])
        moved = self.reshard(opened, *fine)
        self.op("aten.view.default", [Slot(moved), self._local_shape(target)], [closed])
        return closed

    def _local_shape(self, spec: Spec) -> LocalShape:
        return LocalShape(self.shape(tuple(spec.shape)), tuple(encode(spec.placements)))

    def layout(self, placements: PlacementList, shape: tuple[int, ...]) -> Layout:
        return Layout(tuple(encode(placements)), self.shape(tuple(shape)))

    def op(self, name: str, args: list[Arg], outs: list[int], kwargs: dict[str, Arg] | None = None) -> None:
        self.body.append(Op(name, args, kwargs or {}, outs))

    def program(self, name: str, outputs: list[int]) -> Program:
        operands = self.numbers + len(self.operands)
        return Program(name, mesh_id(self.mesh), self.inputs, operands, self.body, outputs)


def order_or_none(spec: Spec) -> list[int] | None:
    """The stride order of a tensor; None, and only then surely, where it is that of a contiguous one."""
    stride = spec.stride
    return None if all(map(operator.ge, stride, stride[1:])) else stride_order(spec.shape, stride)


class ArgWriter:
    """Writes a call's arguments as program arguments: tensors as slots, numbers and sizes as operands, the rest as constants."""

    def __init__(self, info: OpInfo, builder: Builder, slots: list[int], local_shapes: dict[str, Layout]) -> None:
        self.info = info
        self.builder = builder
        self.slots = slots
        self.local_shapes = local_shapes
        self.numbers = 0

    def write(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Arg], dict[str, Arg]]:
        schema = self.info.arguments
        written = [self._argument(schema[i], value) for i, value in enumerate(args)]
        named = {name: self._argument(self.info.by_name[name], value) for name, value in kwargs.items()}
        return written, named

    def _argument(self, argument: Any, value: Any) -> Arg:
        if value is None:
            return None
        layout = self.local_shapes.get(argument.name)
        if layout is not None:
            return LocalShape(layout.shape, layout.placements)
        if argument.is_number:
            return self._number(value)
        if argument.is_size:
            return self.builder.operand(list(value) if isinstance(value, (list, tuple)) else value)
        return self._constant(value)

    def _number(self, value: Any) -> Arg:
        if isinstance(value, (list, tuple)):
            return [self._number(item) for item in value]
        if value is None:
            return None
        if type(value) is complex:
            return Const("complex", repr(value))
        if isinstance(value, TensorArg):
            return Slot(self.slots[value.index])
        self.numbers += 1
        return Operand(self.numbers - 1)

    def _constant(self, value: Any) -> Arg:
        if isinstance(value, TensorArg):
            return Slot(self.slots[value.index])
        if isinstance(value, (list, tuple)):
            return [self._constant(item) for item in value]
        if isinstance(value, torch.dtype):
            return Const("dtype", dtype_name(value))
        if isinstance(value, torch.layout):
            return Const("layout", str(value).removeprefix("torch."))
        if isinstance(value, torch.memory_format):
            return Const("memory_format", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Const("device", "")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, complex):
            return Const("complex", repr(value))
        raise TypeError(
            f"{self.info.name}: dtorch cannot send an argument of type {type(value).__name__} to its workers"
        )
