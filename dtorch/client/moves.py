"""``x.to(device)``: a tensor keeps its mesh's shape and its placements when it goes to another type of device."""

from __future__ import annotations

from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placing import device_named
from ..tensor import Tensor


def to(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``torch.Tensor.to`` on a tensor that lives on a mesh.

    Raises:
        DeviceUnavailable: devices that do not exist here.
        ValueError: a device that dtorch cannot use; one device for a tensor on many.
    """
    first = args[0] if args else None
    if isinstance(first, DeviceMesh) or isinstance(kwargs.get("device"), DeviceMesh):
        raise TypeError("to(): a DeviceMesh is no device; x.redistribute(mesh, placements) brings x to another mesh")
    if isinstance(first, (str, torch.device, int)) and not isinstance(first, bool):
        device, args = first, args[1:]
    else:
        device = kwargs.get("device")
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    if device is None:
        return _to(x, *args, **kwargs)
    if not isinstance(device, int) and torch.device(device).type == "meta":
        return _to(x, device, *args, **kwargs)
    mesh = _target(x, *device_named("to", device))
    moved = x if mesh is None else x.redistribute(mesh, x.placements)
    if not args and not kwargs:
        return moved
    dtype, rest = kwargs.pop("dtype", None), args
    if args:
        dtype, rest = args[0], args[1:]
    return _to(moved, moved.dtype if dtype is None else dtype, *rest, **kwargs)


_to = torch.Tensor.to


def _target(x: Tensor, kind: str, index: int | None) -> DeviceMesh | None:
    """The mesh to go to; None: ``x`` is there."""
    mesh = x.device_mesh
    if kind not in ("cpu", "cuda") or (kind == "cpu" and mesh.device_type == "cpu"):
        return None
    if kind == "cpu" or index is None:
        return None if mesh.device_type == kind else DeviceMesh(kind, mesh.mesh, mesh.mesh_dim_names)
    if mesh.size() > 1:
        raise ValueError(
            f"to(): '{kind}:{index}' is one device and the tensor is on {mesh}; x.to({kind!r}) keeps the mesh's shape, "
            f"x.redistribute(device_mesh=dtorch.DeviceMesh('{kind}:{index}'), placements=[...]) brings it to that one"
        )
    target = DeviceMesh(kind, mesh.mesh.fill_(index), mesh.mesh_dim_names)
    return None if target == mesh else target
