"""Linear layers split by output features (column-parallel), by input features (row-parallel) or not at all.

The names are those of Megatron-LM (https://arxiv.org/abs/1909.08053), which writes ``y = x A``: a column of A makes one output
feature. torch stores the transpose, so a column is a row of ``weight``.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import hints
from ..mesh import DeviceMesh
from ..placement import REPLICATE, Shard
from .placed import ParallelLayer, checked_mesh, checked_shard_type

LAST = Shard(-1)


class Linear(ParallelLayer, torch.nn.Linear):
    """``torch.nn.Linear``; with ``device_mesh``, split along one of its axes.

    Args:
        in_features, out_features, bias, device, dtype: as in torch.
        device_mesh: where the parameters are made. Without it the layer is torch's, exactly.
        tp_dim: the name of the axis that splits the layer. A mesh without it replicates the layer.
        tp_shard_type: ``"col"``: by output features, as `ColumnParallelLinear`; ``"row"``: by input features, as `RowParallelLinear`.

    Shapes are torch's: ``(*, in_features)`` → ``(*, out_features)``, ``weight`` ``(out_features, in_features)``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind; ``device`` and ``device_mesh`` both.
        DeviceUnavailable: a device that does not exist here.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> Linear(4, 6, device_mesh=mesh, tp_shard_type="row")
        Linear(in_features=4, out_features=6, bias=True, weight=[Shard(dim=1)], bias=[Replicate()])
        >>> Linear(4, 6)
        Linear(in_features=4, out_features=6, bias=True)
    """

    stands_for = torch.nn.Linear
    splits = {"col": {"weight": 0, "bias": 0}, "row": {"weight": 1}, None: {}}

    @hints.takes
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        tp_dim: str = "tp",
        tp_shard_type: str = "col",
    ) -> None:
        checked_shard_type(type(self).__name__, tp_shard_type)
        mesh = checked_mesh(type(self).__name__, device, device_mesh, tp_dim, use_default=False)
        self._make(
            in_features, out_features, bias, device, dtype, mesh, tp_dim, None if mesh is None else tp_shard_type
        )

    def _make(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: Any,
        dtype: torch.dtype | None,
        mesh: DeviceMesh | None,
        tp_dim: str,
        tp_shard_type: str | None,
    ) -> None:
        torch.nn.Linear.__init__(self, in_features, out_features, bias, device if mesh is None else "meta", dtype)
        self.tp_dim, self.tp_shard_type = tp_dim, tp_shard_type
        if mesh is not None:
            self.place_parameters(mesh)

    def redistribute_input(self, input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The input whole along ``tp_dim`` for a layer split by columns, by its last dim for one split by rows."""
        if self.tp_shard_type is None:
            return (input,), {}
        return (self.along(input, REPLICATE if self.tp_shard_type == "col" else LAST),), {}

    def redistribute_output(self, out: Any) -> Any:
        """By its last dim for a layer split by columns; as it comes, a pending sum, for one split by rows."""
        return self.along(out, LAST) if self.tp_shard_type == "col" else out

    def _forward(self, input: Any) -> Any:
        return torch.nn.functional.linear(input, self.weight, self.bias)


class _Split(Linear):
    """A `Linear` whose class says how it is split. Built without a mesh it is on the default mesh, if there is one."""

    _shard_type: str | None

    @hints.takes
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        tp_dim: str = "tp",
    ) -> None:
        mesh = checked_mesh(type(self).__name__, device, device_mesh, tp_dim, use_default=True)
        self._make(in_features, out_features, bias, device, dtype, mesh, tp_dim, self._shard_type)


class ColumnParallelLinear(_Split):
    """A linear layer split by output features along the mesh axis ``tp_dim``; the output is ``Shard(-1)`` along it.

    The input may come with any placements and is made whole along ``tp_dim``; the weights stay where they are. Along other axes
    (``dp``, sequence) input and output keep the input's placements. On a mesh without ``tp_dim`` it is a replicated layer.

    Args:
        in_features, out_features, bias, dtype: as for ``torch.nn.Linear``.
        device_mesh: where the parameters are made; the mesh of `default_mesh`, if left out and there is one; else a plain layer.
        tp_dim: the name of the axis.

    Shapes: ``(*, in_features)`` → ``(*, out_features)``; ``weight`` ``(out_features, in_features)`` ``Shard(0)``, ``bias`` ``Shard(0)``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind; ``device`` and ``device_mesh`` both.

    Example::

        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
        >>> layer = ColumnParallelLinear(4, 6, device_mesh=mesh)
        >>> layer(ones(8, 4, device_mesh=mesh, placements=[Shard(0), Replicate()])).placements
        [Shard(dim=0), Shard(dim=1)]
    """

    _shard_type = "col"


class ColumnParallelLinearWithReplicateOutput(ColumnParallelLinear):
    """A `ColumnParallelLinear` whose output is gathered along ``tp_dim``.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> ColumnParallelLinearWithReplicateOutput(4, 6, device_mesh=mesh)(ones(8, 4, device_mesh=mesh)).placements
        [Replicate()]
    """

    def redistribute_output(self, out: Any) -> Any:
        """The output whole along ``tp_dim``."""
        return self.along(out, REPLICATE)


class ColumnParallelLinearWithReplicateInputOutput(ColumnParallelLinearWithReplicateOutput):
    """A `ColumnParallelLinear` whose input and output are both gathered along ``tp_dim``: whole in, whole out, split inside.

    `ColumnParallelLinearWithReplicateOutput` does the same, since every column-parallel layer here makes its input whole; the name
    says it where a reader should see it, after a sequence-sharded norm for instance.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> layer = ColumnParallelLinearWithReplicateInputOutput(4, 6, device_mesh=mesh)
        >>> layer(ones(8, 4, device_mesh=mesh, placements=[Shard(0)])).placements
        [Replicate()]
    """


class RowParallelLinear(_Split):
    """A linear layer split by input features along the mesh axis ``tp_dim``; the output is a pending sum along it.

    The input may come with any placements and is split by its last dim; what a `ColumnParallelLinear` made is already, so that the
    two communicate only where the sum is needed. Along other axes placements are the input's. (The product is planned like any
    other: where the weights are fewer bytes than the sum, they are moved instead, and the output comes split by its first dim.)

    Args:
        in_features, out_features, bias, dtype: as for ``torch.nn.Linear``.
        device_mesh: where the parameters are made; the mesh of `default_mesh`, if left out and there is one; else a plain layer.
        tp_dim: the name of the axis.

    Shapes: ``(*, in_features)`` → ``(*, out_features)``; ``weight`` ``(out_features, in_features)`` ``Shard(1)``, ``bias`` replicated.

    Raises:
        TypeError, ValueError: an argument of the wrong kind; ``device`` and ``device_mesh`` both.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> RowParallelLinear(64, 32, device_mesh=mesh)(ones(8, 64, device_mesh=mesh)).placements
        [Partial()]
    """

    _shard_type = "row"


class RowParallelLinearWithReplicateOutput(RowParallelLinear):
    """A `RowParallelLinear` whose output is summed at once.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> RowParallelLinearWithReplicateOutput(4, 6, device_mesh=mesh)(ones(8, 4, device_mesh=mesh)).placements
        [Replicate()]
    """

    def redistribute_output(self, out: Any) -> Any:
        """The output whole along ``tp_dim``."""
        return self.along(out, REPLICATE)


class ReplicateParallelLinear(_Split):
    """A linear layer that every device holds whole, and that works on whatever part of the input it has (a router, a small head).

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> layer = ReplicateParallelLinear(4, 6, device_mesh=mesh)
        >>> layer(ones(8, 4, device_mesh=mesh, placements=[Shard(0)])).placements
        [Shard(dim=0)]
    """

    _shard_type = None
