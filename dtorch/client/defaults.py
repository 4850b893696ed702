"""The default mesh, the seed, and the hold on gradient synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import hints
from ..mesh import DeviceMesh
from . import host, runtime, torch_internals
from .leaves import no_sync


class _OnMesh(TorchFunctionMode):
    """torch's own factories make tensors of ours on the default mesh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mesh = runtime.chosen_mesh()
        if mesh is None or func not in torch_internals.factories() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs)
        if type(made) is torch.Tensor:
            made = host.from_plain(made, mesh)
        return made.requires_grad_(True) if requires_grad else made


@hints.takes
def default_mesh(mesh: DeviceMesh) -> AbstractContextManager[DeviceMesh]:
    """Within it, tensors that name no mesh are made on ``mesh``, replicated: dtorch's factories and torch's own.

    Example::

        >>> with default_mesh(DeviceMesh("cpu", [0, 1])):
        ...     torch.ones(2).device_mesh
        DeviceMesh('cpu', [0, 1])
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"default_mesh(): argument 'mesh' must be a DeviceMesh, got {type(mesh).__name__}")
    return _default(mesh)


@contextmanager
def _default(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    before = runtime.set_default_mesh(mesh)
    try:
        with _OnMesh():
            yield mesh
    finally:
        runtime.set_default_mesh(before)


@hints.takes
def manual_seed(seed: int) -> torch.Generator:
    """Seed every random op; ``torch.manual_seed`` does the same."""
    return torch.manual_seed(seed)


__all__ = ["default_mesh", "manual_seed", "no_sync"]
