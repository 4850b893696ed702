"""The gradient of a tensor that was taken apart into the parts it packs: packed as the tensor is, so that nothing moves.

``split`` gives each device its part of each block (`dtorch.sharding.packing`). Its backward is ``cat``, of gradients sharded along the
dim that they are put together in, which for any other ``cat`` have to be brought together first.
"""

from __future__ import annotations

from typing import Any

from ..placement import is_shard
from ..sharding.packing import JOIN
from ..tensor import Tensor
from . import torch_internals


def cat(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``cat``; in the backward of a split, that of equal shards as one packed tensor."""
    if not torch_internals.is_backward_of("Split"):
        return NotImplemented
    parts = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if _are_equal_shards(parts, dim):
        from . import dispatch

        return dispatch.call(dispatch.info_of(JOIN), (parts, dim % parts[0].ndim), {})
    return NotImplemented


def _are_equal_shards(parts: Any, dim: int) -> bool:
    first = parts[0]
    if len(parts) < 2 or type(first) is not Tensor or first._spec is None or not first.ndim:
        return False
    if not all(type(part) is Tensor and part._spec is first._spec for part in parts):
        return False
    spec, dim = first._spec, dim % first.ndim
    splits = [n for p, n in zip(spec.placements, spec.mesh.shape, strict=True) if is_shard(p) and p.dim == dim]  # type: ignore[attr-defined]
    return len(splits) == 1 and spec.shape[dim] % splits[0] == 0
