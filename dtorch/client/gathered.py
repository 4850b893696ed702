"""Ops whose outputs' shapes depend on values."""

from __future__ import annotations

from typing import Any

from ..errors import DTorchError
from ..sharding.plan import plan_gathered
from ..sharding.schema import OpInfo
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import aliasing, inserted, issuing
from .controller import Controller
from .handles import wrap
from .planning import with_metas


def run(
    info: OpInfo, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], numbers: list[Any], controller: Controller
) -> Any:
    """Run one: on whole tensors, and Python waits to learn the shapes."""
    if info.structure not in ("tensor", "tuple") or info.is_mutable:
        raise DTorchError(f"{info.name} is not supported on dtorch tensors: call it on x.to_torch()")
    metas, named = with_metas(args, kwargs)
    count = len(info.op._schema.returns)
    plan = plan_gathered(info, metas, named, [t._spec for t in tensors], count)
    mesh = plan.mesh
    controller.mesh(mesh)
    if plan.moves:
        inserted.tell(info.name, [t._spec for t in tensors], plan.moves, plan.decision.gathered, plan.call)
    aliasing.tell(tensors)
    program = controller.define(plan.program)
    values = issuing.queue(controller, program, tensors, count, [*numbers, *plan.operands], info.name)
    described = controller.describe([v.id for v in values], mesh)
    placements = plan.decision.inputs[0]
    results = [
        wrap(Spec.of(mesh, placements, shape, stride, dtype), value)
        for value, (shape, stride, dtype) in zip(values, described, strict=True)
    ]
    return results[0] if info.structure == "tensor" else tuple(results)
