"""An op on tensors of several meshes, as there are where a pipeline's stages share an optimizer and a norm of their gradients.

List ops run mesh by mesh. A 0-d tensor comes to where the others are, as torch takes a 0-d cpu tensor among cuda ones: torch's code for
several devices (``norm.to(first_device)``) moves nothing here, where all tensors say that they are on one. It is told like every
communication that nobody asks for. Others stay an error: what is not small was left on a stage by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import MeshMismatch
from ..mesh import DeviceMesh
from ..sharding.spec import Spec, replicated
from ..tensor import Tensor
from . import inserted, kept, lines, runtime
from .handles import tensors_in
from .planning import with_tensors


def run(info: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor], error: MeshMismatch) -> Any:
    """A call that planning has refused with ``error``."""
    from .dispatch import call, one_by_one

    if info.is_foreach and count_of(args) > 1:
        groups = _by_mesh(info, args, kwargs, tensors)
        if groups is None:
            return one_by_one(info, args, kwargs)
        if len(groups) > 1:
            return _group_by_group(info, args, kwargs, groups)
    return call(info, *with_tensors(args, kwargs, _brought(info, args, kwargs, tensors, error)))


def _by_mesh(info: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> list[list[int]] | None:
    """The indices of a list op's items on each mesh; None if an item is on several, or is written and read by another."""
    if info.is_mutable and len({t._value.root for t in tensors}) < len(tensors):
        return None
    count = count_of(args)
    groups: dict[DeviceMesh, list[int]] = {}
    for i in range(count):
        items = [value[i] for value in (*args, *kwargs.values()) if is_list_of(value, count)]
        meshes = {tensor._spec.mesh for tensor in items if isinstance(tensor, Tensor)}
        if len(meshes) != 1:
            return None
        groups.setdefault(meshes.pop(), []).append(i)
    return list(groups.values())


def count_of(args: Any) -> int:
    """How many items the lists of a list op have. (The first argument of ``_foreach_pow`` may be a number.)"""
    return next(len(value) for value in args if isinstance(value, (list, tuple)))


def is_list_of(value: Any, count: int) -> bool:
    """Whether an argument of a list op is one of its lists."""
    return isinstance(value, (list, tuple)) and len(value) == count


def _group_by_group(info: Any, args: Any, kwargs: dict[str, Any], groups: list[list[int]]) -> list[Any] | None:
    from .dispatch import call

    count = count_of(args)

    def of_group(value: Any, group: list[int]) -> Any:
        return [value[i] for i in group] if is_list_of(value, count) else value

    results: list[Any] = [None] * count
    for group in groups:
        made = call(
            info,
            tuple([of_group(value, group) for value in args]),
            {name: of_group(value, group) for name, value in kwargs.items()},
        )
        for i, one in zip(group, made or (), strict=False):
            results[i] = one
    return results if info.structure == "list" else None


def _brought(
    info: Any, args: Any, kwargs: dict[str, Any], tensors: Sequence[Tensor], error: MeshMismatch
) -> list[Tensor]:
    """The tensors with those that are 0-d on the mesh of the others, or of the first; ``error`` if they cannot be brought there.

    Not what is written or viewed, which has to be where it is; nor what requires grad, whose gradient would be left on the other mesh.
    """
    placed = [t for t in tensors if t.ndim] or tensors
    mesh = placed[0]._spec.mesh
    written = {id(t) for a in info.written for t in tensors_in(info.value_of(a, args, kwargs))}
    away = [t for t in tensors if t._spec.mesh is not mesh]
    with_grad = torch.is_grad_enabled()
    if info.is_view or any(t.ndim or id(t) in written or (with_grad and t.requires_grad) for t in away):
        raise lines.with_line(error) from None
    goals = {id(t): Spec.of(mesh, replicated(mesh), t._spec.shape, t._spec.stride, t._spec.dtype) for t in away}
    moves = [(t._spec, goals[id(t)]) for t in away]
    inserted.tell(info.name, [t._spec for t in tensors], moves, False, None)
    controller = runtime.controller()
    return [kept.at(t, goals[id(t)], info.name, controller) if id(t) in goals else t for t in tensors]
