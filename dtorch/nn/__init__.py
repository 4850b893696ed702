"""``torch.nn``, and layers that know how to be parallel. Whatever is not listed here is torch's own.

The layers take ``device_mesh=`` and the name of the mesh axis that splits them (``tp_dim="tp"``). On a mesh without that axis, or
without any mesh, they are the plain layers: one model definition runs on any mesh. Parameters and state dicts are torch's, by name
and shape.
"""

from __future__ import annotations

from typing import Any as _Any

import torch.nn as _torch_nn

from . import functional
from .context_parallel import SdpaOption
from .distribute import distribute_module
from .embedding import Embedding, EmbeddingWithReplicateOutput
from .linear import (
    ColumnParallelLinear,
    ColumnParallelLinearWithReplicateInputOutput,
    ColumnParallelLinearWithReplicateOutput,
    Linear,
    ReplicateParallelLinear,
    RowParallelLinear,
    RowParallelLinearWithReplicateOutput,
)
from .summaries import Summary, summary

__all__ = [
    "ColumnParallelLinear",
    "ColumnParallelLinearWithReplicateInputOutput",
    "ColumnParallelLinearWithReplicateOutput",
    "Embedding",
    "EmbeddingWithReplicateOutput",
    "Linear",
    "ReplicateParallelLinear",
    "RowParallelLinear",
    "RowParallelLinearWithReplicateOutput",
    "SdpaOption",
    "Summary",
    "distribute_module",
    "functional",
    "summary",
]

_OURS = tuple(__all__)
__all__ += [name for name in dir(_torch_nn) if not name.startswith("_") and name not in _OURS]


def __getattr__(name: str) -> _Any:
    try:
        return getattr(_torch_nn, name)
    except AttributeError:
        raise AttributeError(f"module 'dtorch.nn' has no attribute {name!r}, and neither has torch.nn") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch_nn)})
