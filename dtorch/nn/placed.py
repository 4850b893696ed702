"""What the parallel layers share: parameters split along one mesh axis, made on the workers, and hooks around ``forward``."""

from __future__ import annotations

from typing import Any

import torch

from .. import creation
from ..client import runtime
from ..mesh import DeviceMesh
from ..placement import REPLICATE, Placement, PlacementList, is_shard, shard
from ..placing import distribute_tensor
from ..tensor import Tensor

SHARD_TYPES = ("col", "row")


class AlsoTorchs(type):
    """``isinstance(x, dtorch.nn.Linear)`` holds for torch's own too, as scripts that look for a model's layers expect."""

    def __instancecheck__(cls, instance: Any) -> bool:
        stands_for = cls.__dict__.get("stands_for")
        return type.__instancecheck__(cls, instance) or (stands_for is not None and isinstance(instance, stands_for))


class ParallelLayer(torch.nn.Module, metaclass=AlsoTorchs):
    """A layer of torch's with placed parameters and hooks. Comes before torch's class among the bases.

    The hooks act along the axis ``tp_dim`` of the mesh that their tensor is on, and leave alone what is not on such a mesh. Other
    axes keep their placements. A subclass may override them.
    """

    #: The name of the mesh axis that splits the parameters.
    tp_dim: str
    #: ``"col"``: by output features; ``"row"``: by input features (an embedding: by rows); None: not split.
    tp_shard_type: str | None

    #: For each way to split: parameter name → the dim that is split; parameters that are not named are replicated.
    splits: dict[str | None, dict[str, int]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self.redistribute_input(*args, **kwargs)
        return self.redistribute_output(self._forward(*args, **kwargs))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The plain layer's ``forward``."""
        return super().forward(*args, **kwargs)

    def redistribute_input(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What ``forward`` gets, of what the layer was called with."""
        return args, kwargs

    def redistribute_output(self, out: Any) -> Any:
        """What the layer returns, of what ``forward`` made."""
        return out

    def along(self, x: Any, placement: Placement) -> Any:
        """``x`` with ``placement`` along the axis ``tp_dim``; ``x`` itself if it is not on a mesh with such an axis."""
        if not isinstance(x, Tensor) or x._spec is None:
            return x
        mesh: DeviceMesh = x._spec.mesh
        axis = mesh.dim_name_index(self.tp_dim)
        if axis is None or (is_shard(placement) and x.ndim == 0):  # what is wrong with a scalar, the op says itself
            return x
        placements = list(x.placements)
        placements[axis] = placement
        return x.redistribute(mesh, placements)

    def place_parameters(self, mesh: DeviceMesh) -> None:
        """Put the layer's parameters on ``mesh``; those on the meta device are made there and initialised as torch does."""
        fresh = False
        for name, parameter in list(self.named_parameters(recurse=False)):
            where = (mesh, self.parameter_placements(name, mesh))
            if parameter.is_meta:
                fresh = True
                made = creation.empty(parameter.shape, dtype=parameter.dtype, device_mesh=where[0], placements=where[1])
            else:
                made = distribute_tensor(parameter.detach(), *where)
            setattr(self, name, torch.nn.Parameter(made, requires_grad=parameter.requires_grad))
        if fresh:
            self.reset_parameters()  # type: ignore[operator]

    def parameter_placements(self, name: str, mesh: DeviceMesh) -> PlacementList:
        """Where the layer puts the parameter ``name`` on ``mesh``."""
        dim = self.splits[self.tp_shard_type].get(name)
        axis = mesh.dim_name_index(self.tp_dim)
        return PlacementList(shard(dim) if a == axis and dim is not None else REPLICATE for a in range(mesh.ndim))

    def extra_repr(self) -> str:
        placed = [
            f"{name}={parameter.placements}"
            for name, parameter in self.named_parameters(recurse=False)
            if isinstance(parameter, Tensor)
        ]
        return ", ".join([super().extra_repr(), *placed])


def checked_mesh(name: str, device: Any, device_mesh: Any, tp_dim: Any, use_default: bool) -> DeviceMesh | None:
    """The mesh that a layer's arguments ask for; None: it is a plain layer."""
    if not isinstance(tp_dim, str):
        raise TypeError(f"{name}(): argument 'tp_dim' must be the name of a mesh axis, not {type(tp_dim).__name__}")
    if device_mesh is None:
        return runtime.chosen_mesh() if use_default and device is None else None
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"{name}(): argument 'device_mesh' must be a DeviceMesh, not {type(device_mesh).__name__}")
    if device is not None:
        raise ValueError(f"{name}(): device= and device_mesh= cannot be given together; a mesh names its devices")
    return device_mesh


def checked_shard_type(name: str, found: Any) -> None:
    if found not in SHARD_TYPES:
        raise ValueError(f"{name}(): tp_shard_type must be one of {', '.join(map(repr, SHARD_TYPES))}, got {found!r}")
