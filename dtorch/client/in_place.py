"""Device functions that change placed tensors in place, or that only look at them: no result, a side effect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..program.ir import Local, Slot
from ..sharding.builder import Builder
from ..tensor import Tensor
from . import issuing, runtime


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
    issuing.run(controller, controller.define(builder.program(name, [])), tensors, (), builder.operands, name, written)
