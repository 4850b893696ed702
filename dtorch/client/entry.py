"""Puts the client together: the tensor class, its dispatch, and the device it says it is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import Placement
from ..tensor import Tensor
from . import composites, dispatch, host, refused, torch_internals, values_out
from . import redistribute as _redistribute

torch_internals.register_device(host.make, lambda seed: None)
torch_internals.support_foreach(Tensor)
refused.install(Tensor)
torch_internals.read_lists_of(values_out.plain_data)
composites.register()


def redistribute(x: Any, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None) -> Any:
    """`Tensor.redistribute` as a function, which also works inside ``torch.func``, where the class of ``x`` is hidden."""
    if isinstance(x, Tensor):
        return x.redistribute(device_mesh, placements)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"redistribute(): argument 'x' must be a tensor, not {type(x).__name__}")
    if device_mesh is None or placements is None:
        raise ValueError("redistribute(): inside torch.func both device_mesh and placements are needed")
    return _redistribute.redistribute(x, device_mesh, list(placements))


__all__ = ["dispatch", "redistribute"]
