"""Puts the client together: the tensor class, its dispatch, and the device it says it is on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import hints
from ..mesh import DeviceMesh
from ..placement import Placement
from ..tensor import Tensor
from . import composites, dispatch, host, operators, rebinding, refused, torch_internals, values_out
from . import redistribute as _redistribute

torch_internals.register_device(host.make, host.factory, lambda seed: None)
torch_internals.support_foreach(Tensor)
torch_internals.expect_no_rules(Tensor)
torch_internals.refuse_wrappers(Tensor, DeviceMesh)
refused.install(Tensor)
operators.install(Tensor)
torch_internals.read_lists_of(values_out.plain_data)
torch_internals.set_data_by(Tensor, rebinding.become)
composites.register()


@hints.takes
def redistribute(x: Any, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None) -> Any:
    """`Tensor.redistribute` as a function, which also works inside ``torch.func``, where the class of ``x`` is hidden.

    Args:
        x: a dtorch tensor. Inside ``torch.func`` both other arguments are needed.

    Raises:
        TypeError, ValueError: as `Tensor.redistribute`; a plain tensor.

    Example::

        >>> x = ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]))
        >>> redistribute(x, placements=[Shard(0)]).placements
        [Shard(dim=0)]
    """
    if isinstance(x, Tensor):
        return x.redistribute(device_mesh, placements)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"redistribute(): argument 'x' must be a tensor, not {type(x).__name__}")
    if device_mesh is None or placements is None:
        raise ValueError(
            "redistribute(): expected a dtorch tensor; inside torch.func, give both device_mesh and placements"
        )
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(
            f"redistribute(): argument 'device_mesh' must be a DeviceMesh, not {type(device_mesh).__name__}"
        )
    return _redistribute.redistribute(x, device_mesh, list(placements))


__all__ = ["dispatch", "redistribute"]
