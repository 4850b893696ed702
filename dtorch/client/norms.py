"""``rms_norm``, kept whole where no gradient is needed: one op for torch's six, which cost the client 100 us where this costs 25.

With a gradient it stays composed, so that gradients have the bits of plain torch; so it does where a normalised dim is split, for then only
the means of squares are summed over devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..placement import is_split
from ..tensor import Tensor
from .products import run_whole
from .torch_internals import compose, is_differentiated

RMS_NORM = torch.ops.aten.rms_norm.default


def rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """torch's op: (…, D) and (D), for one or more normalised dims."""
    if not is_differentiated(x, weight) and _fits(x, len(normalized_shape), weight):
        return run_whole(RMS_NORM, x, normalized_shape, weight, eps)
    return compose(RMS_NORM, x, normalized_shape, weight, eps)


def _fits(x: Any, count: int, weight: Any) -> bool:
    if type(x) is not Tensor or x._spec is None:
        return False
    if weight is not None and (type(weight) is not Tensor or weight._spec is None or weight.dtype != x.dtype):
        return False
    batch = len(x._spec.shape) - count
    return all(not is_split(p) or p.dim < batch for p in x._spec.placements)  # type: ignore[attr-defined]


def run(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The dispatch handler, where the op arrives whole: under inference mode."""
    return rms_norm(*args, **kwargs)
