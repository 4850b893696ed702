"""Graph: the cluster and its defaults under the names that some programs know them by. Each is another name of a `dtorch` function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from .client import defaults, memory, runtime
from .errors import DeviceUnavailable
from .future import TensorFuture
from .mesh import DeviceMesh


class Graph:
    """The cluster of this process. There is one: `default_graph`.

    Example::

        >>> graph = Graph.default_graph()
        >>> with graph.device_mesh_guard(DeviceMesh("cpu", [0, 1])), graph.dtype_guard(torch.float64):
        ...     torch.ones(2)
        tensor([1., 1.], shape=(2,), dtype=torch.float64, device_mesh=DeviceMesh('cpu', [0, 1]), placements=[Replicate()])
    """

    @staticmethod
    def default_graph() -> Graph:
        """The one graph; the same object each time."""
        return _GRAPH

    @property
    def default_device_mesh(self) -> DeviceMesh:
        """The mesh of tensors that name none: that of `device_mesh_guard`, else one CPU device."""
        return runtime.get_default_mesh()

    @property
    def default_dtype(self) -> torch.dtype:
        """``torch.get_default_dtype()``."""
        return torch.get_default_dtype()

    def device_mesh_guard(self, mesh: DeviceMesh) -> AbstractContextManager[DeviceMesh]:
        """`dtorch.default_mesh`."""
        return defaults.default_mesh(mesh)

    @contextmanager
    def dtype_guard(self, dtype: torch.dtype) -> Iterator[torch.dtype]:
        """Within it, ``dtype`` is torch's default dtype.

        Raises:
            TypeError: not a dtype, or not a floating-point one.
        """
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield dtype
        finally:
            torch.set_default_dtype(before)

    def sync(self) -> None:
        """`dtorch.synchronize`."""
        runtime.synchronize()

    def sync_future(self) -> TensorFuture:
        """A future, of None, that is done when everything issued so far has run; it raises what `dtorch.synchronize` would."""
        return runtime.synchronize_async()

    def empty_cache(self) -> None:
        """Have the memory of tensors that have died freed now, and wait for it. (It is freed soon anyway.)"""
        runtime.synchronize()

    def get_memory_stats(self, mesh: DeviceMesh | None = None) -> dict[torch.device, dict[str, Any]]:
        """`dtorch.memory_stats`."""
        return memory.memory_stats(mesh)

    def satisfy(self, mesh: DeviceMesh) -> bool:
        """Whether the devices of ``mesh`` can be had; starts those that do not run yet."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"satisfy(): argument 'mesh' must be a DeviceMesh, got {type(mesh).__name__}")
        try:
            runtime.controller().mesh(mesh)
        except DeviceUnavailable:
            return False
        return True


_GRAPH = Graph()


def default_graph() -> Graph:
    """The one `Graph` of this process.

    Example::

        >>> default_graph() is Graph.default_graph()
        True
    """
    return _GRAPH
