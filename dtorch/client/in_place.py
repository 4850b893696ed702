"""Device functions that change placed tensors in place, or that only look at them: no result, a side effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..program.ir import Local, Slot
from ..sharding.plan import Builder
from ..tensor import Tensor
from . import aliasing, runtime
from .interrupts import critical


def run(name: str, tensors: Sequence[Tensor], arguments: Sequence[Any], written: Sequence[int]) -> None:
    """Have every device run the device function ``name`` on its parts of ``tensors``, which are on one mesh.

    Args:
        arguments: what follows the tensors: anything msgpack can write; not part of the program.
        written: the positions of tensors that it writes in place.
    """
    controller = runtime.controller()
    mesh = tensors[0]._spec.mesh
    controller.mesh(mesh)
    builder = Builder(mesh, len(tensors), 0)
    layouts = [builder.layout(t._spec.placements, tuple(t._spec.shape)) for t in tensors]
    slots = [Slot(i) for i in range(len(tensors))]
    builder.body.append(Local(name, [*slots, *map(builder.operand, arguments)], {}, [], layouts))
    _queue(builder, name, tensors, written)
    controller.pressure()


@critical
def _queue(builder: Builder, name: str, tensors: Sequence[Tensor], written: Sequence[int]) -> None:
    controller = runtime.controller()
    with controller.lock:
        program = controller.define(builder.program(name, []))
        for tensor in tensors:
            if tensor._value.id < controller.floor:
                raise controller.foreign()
            aliasing.refresh(controller, tensor._value)
        controller.issue([program, *[t._value.id for t in tensors], *builder.operands], name)
        for i in written:
            aliasing.written(controller, tensors[i]._value)
