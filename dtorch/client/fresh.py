"""Placed tensors out of nothing: each device makes its own part, by a device function."""

from __future__ import annotations

from typing import Any

from ..program.ir import Const, Local
from ..raw import dtype_name
from ..sharding.builder import Builder
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import issuing, runtime
from .handles import wrap


def filled(spec: Spec, value: Any) -> Tensor:
    """A new contiguous tensor of ``spec`` full of one number."""
    builder = Builder(spec.mesh, 0, 0)
    number: Any = Const("complex", repr(value)) if isinstance(value, complex) else builder.operand(value)
    return make(builder, "dtorch.full", [number], spec)


def make(builder: Builder, name: str, args: list[Any], spec: Spec) -> Tensor:
    """Run a device function that makes one fresh contiguous tensor."""
    out = builder.slot()
    layout = builder.layout(spec.placements, tuple(spec.shape))
    builder.body.append(Local(name, [*args, Const("dtype", dtype_name(spec.dtype))], {}, [out], [], [layout]))
    controller = runtime.controller()
    controller.mesh(spec.mesh)
    program = controller.define(builder.program(name, [out]))
    (value,) = issuing.run(controller, program, (), (spec,), builder.operands, name)
    return wrap(Spec.of(spec.mesh, spec.placements, spec.shape, None, spec.dtype), value)
