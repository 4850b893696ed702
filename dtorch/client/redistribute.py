"""``dtorch::redistribute``, an op of its own with a gradient and a vmap rule, so that it works inside ``torch.func``."""

from __future__ import annotations

from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import Placement, PlacementList, along, boxed, is_split, normalize, settled
from ..sharding.builder import Builder, order_or_none
from ..sharding.spec import Spec, intern_mesh
from ..tensor import Tensor
from . import issuing, runtime, torch_internals
from .handles import wrap
from .recent import Recent

#: Targets by number: the op's schema can carry an int, but not a mesh.
_TARGETS: list[tuple[DeviceMesh, PlacementList]] = []
_NUMBERS: dict[tuple[DeviceMesh, PlacementList], int] = {}


#: (spec, goal, why) → the program of a move and its operands.
_KNOWN = Recent(4096)
runtime.on_close.append(_KNOWN.forget)


def target_number(mesh: DeviceMesh, placements: PlacementList) -> int:
    key = (mesh, placements)
    found = _NUMBERS.get(key)
    if found is None:
        found = _NUMBERS[key] = len(_TARGETS)
        _TARGETS.append(key)
    return found


@torch.library.custom_op("dtorch::redistribute", mutates_args=())
def _op(x: torch.Tensor, target: int) -> torch.Tensor:
    raise TypeError(
        "redistribute: expected a dtorch tensor; place a plain one with dtorch.from_torch or dtorch.distribute_tensor"
    )


class _Redistribute(torch.autograd.Function):
    """The gradient and the vmap rule of the op. (``torch.library.register_autograd`` does not work under ``torch.func``.)"""

    @staticmethod
    def forward(x: torch.Tensor, target: int) -> torch.Tensor:
        return torch.ops.dtorch.redistribute.default(x, target)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        spec = getattr(torch_internals.innermost(inputs[0]), "_spec", None)
        # The gradient of a pending sum is the same for every addend.
        ctx.back = None
        # Under vmap the spec has dims that the gradient's op will not see: the gradient then stays where it is.
        if spec is not None and len(spec.shape) == inputs[0].ndim:
            ctx.back = target_number(spec.mesh, settled(spec.placements))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad if ctx.back is None else apply(grad, ctx.back)), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: Any) -> torch.Tensor:
        return tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, target: int) -> tuple[torch.Tensor, int]:
        mesh, placements = _TARGETS[target]
        moved = PlacementList(along(p, p.dim + 1) if is_split(p) else p for p in placements)  # type: ignore[attr-defined]
        return apply(x.movedim(in_dims[0], 0), target_number(mesh, moved)), 0


def apply(x: torch.Tensor, target: int) -> torch.Tensor:
    """``x`` at a numbered target; ``x`` itself if it is there."""
    spec = getattr(x, "_spec", None)
    if spec is not None:
        mesh, placements = _TARGETS[target]
        if spec.mesh is intern_mesh(mesh) and spec.placements == placements:
            return x
    return _Redistribute.apply(x, target)


def redistribute(x: Any, mesh: DeviceMesh, placements: list[Placement] | tuple[Placement, ...]) -> Any:
    """``x`` on ``mesh`` with ``placements``; differentiable."""
    return apply(x, target_number(intern_mesh(mesh), normalize(placements, mesh.ndim, x.ndim)))


def run(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dispatch handler of the op."""
    from . import host

    x, target = args
    mesh, placements = _TARGETS[target]
    if type(x) is not Tensor:
        raise TypeError("redistribute: expected a dtorch tensor; place a plain one with dtorch.from_torch")
    if x._spec is None:
        return host.from_plain(x._host.plain, mesh, placements) if x._host.root.joined is None else _joined(x, target)
    return move(x, Spec.of(mesh, placements, x._spec.shape, x._spec.stride, x._spec.dtype))


def move(x: Any, goal: Spec, why: str = "redistribute") -> Any:
    """A new tensor with the values of a placed one, at ``goal``; without autograd, and without torch's dispatcher.

    Args:
        why: what a record or an error says it was for.
    """
    spec = x._spec
    if spec.mesh is not goal.mesh and (spec.has_packed or goal.has_packed):  # between meshes go boxes
        inner = x if not spec.has_packed else move(x, spec.with_placements(boxed(spec.placements)), why)
        there = move(inner, goal.with_placements(boxed(goal.placements)) if goal.has_packed else goal, why)
        return move(there, goal, why) if goal.has_packed else there
    controller = runtime.controller()
    key = spec, goal, why
    known = _KNOWN.get(key) or _KNOWN.older(key)
    if known is None:
        controller.mesh(spec.mesh)
        controller.mesh(goal.mesh)
        known = _program(controller, spec, goal, why)
        _KNOWN.put(key, known)
    program, operands = known
    (value,) = issuing.run(controller, program, (x,), (goal,), operands, why)
    return wrap(goal, value)


def _program(controller: Any, spec: Spec, goal: Spec, why: str) -> tuple[int, list[Any]]:
    """The program of a move and its operands. One serves every shape, but where packed dims are given dims of their own."""
    plain = not (spec.has_packed or goal.has_packed)
    order = order_or_none(spec)
    key = (spec.mesh, spec.placements, goal.mesh, goal.placements, order and tuple(order), spec.dtype, why)
    known = controller.moves.get(key) if plain else None
    if known is not None:
        return known, [list(spec.shape)]
    builder = Builder(spec.mesh, 1, 0)
    out = builder.reshard(0, spec, goal)
    program = controller.define(builder.program(why, [out]))
    if plain:
        controller.moves[key] = program
    return program, builder.operands


def _joined(x: Any, target: int) -> Any:
    from . import host

    host.commit(x, x._host.root.joined._spec.mesh)
    return apply(x, target)
