"""``torch.nn.functional``, which works on dtorch tensors as it is; attention takes one more option."""

from __future__ import annotations

from typing import Any as _Any

import torch.nn.functional as _functional

from .context_parallel import scaled_dot_product_attention as scaled_dot_product_attention


def __getattr__(name: str) -> _Any:
    try:
        return getattr(_functional, name)
    except AttributeError:
        raise AttributeError(
            f"module 'dtorch.nn.functional' has no attribute {name!r}, and neither has torch.nn.functional"
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_functional)})
