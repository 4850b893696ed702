"""Embeddings split by features or by rows."""

from __future__ import annotations

from typing import Any

import torch

from .. import hints
from ..mesh import DeviceMesh
from ..placement import REPLICATE, Shard
from .placed import ParallelLayer, checked_mesh, checked_shard_type

LAST = Shard(-1)


class Embedding(ParallelLayer, torch.nn.Embedding):
    """``torch.nn.Embedding``; with ``device_mesh``, split along one of its axes.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, device, dtype: as in torch.
        device_mesh: where the weight is made. Without it the layer is torch's, exactly.
        tp_dim: the name of the axis that splits the layer. A mesh without it replicates the layer.
        tp_shard_type: ``"col"``: by features, so that the output is ``Shard(-1)`` along the axis; ``"row"``: by rows (the
            vocabulary), so that the output is a pending sum along it.

    Shapes are torch's: ids ``(*)`` → ``(*, embedding_dim)``, ``weight`` ``(num_embeddings, embedding_dim)``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind; ``device`` and ``device_mesh`` both; ``sparse`` with a mesh.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> layer = Embedding(10, 4, device_mesh=mesh, tp_shard_type="row")
        >>> layer
        Embedding(10, 4, weight=[Shard(dim=0)])
        >>> layer(zeros(3, dtype=int64, device_mesh=mesh)).placements
        [Partial()]
    """

    stands_for = torch.nn.Embedding
    splits = {"col": {"weight": 1}, "row": {"weight": 0}, None: {}}

    #: Whether the class is parallel without being given a mesh: on the default mesh.
    _use_default = False

    @hints.takes
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: torch.Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        device_mesh: DeviceMesh | None = None,
        tp_dim: str = "tp",
        tp_shard_type: str = "col",
    ) -> None:
        name = type(self).__name__
        checked_shard_type(name, tp_shard_type)
        mesh = checked_mesh(name, device, device_mesh, tp_dim, self._use_default)
        if sparse and mesh is not None:
            raise ValueError(f"{name}(): sparse=True makes sparse gradients, which dtorch does not have; leave it out")
        torch.nn.Embedding.__init__(
            self,
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device if mesh is None else "meta",
            dtype,
        )
        self.tp_dim = tp_dim
        self.tp_shard_type = tp_shard_type if mesh is not None or self._use_default else None
        if mesh is not None:
            self.place_parameters(mesh)

    def redistribute_input(self, input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The ids whole along ``tp_dim``."""
        return (input if self.tp_shard_type is None else self.along(input, REPLICATE),), {}

    def redistribute_output(self, out: Any) -> Any:
        """By its last dim for a layer split by features; as it comes, a pending sum, for one split by rows."""
        return self.along(out, LAST) if self.tp_shard_type == "col" else out


class EmbeddingWithReplicateOutput(Embedding):
    """An `Embedding` split along ``tp_dim`` whose output is whole along it. Built without a mesh it is on the default mesh, if any.

    ``tp_shard_type="col"`` gathers features, which moves least; ``"row"``, by vocabulary, sums, and suits a weight that is tied to a
    `ColumnParallelLinear` head.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> layer = EmbeddingWithReplicateOutput(10, 4, device_mesh=mesh)
        >>> layer(zeros(3, dtype=int64, device_mesh=mesh)).placements
        [Replicate()]
    """

    _use_default = True

    def redistribute_output(self, out: Any) -> Any:
        """The output whole along ``tp_dim``."""
        return self.along(out, REPLICATE)
