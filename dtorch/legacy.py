"""``dtorch.FloatTensor`` and the like: torch's constructors by dtype, of tensors of ours."""

from __future__ import annotations

from typing import Any

import torch

from .placing import from_torch

NAMES = tuple(
    f"{kind}Tensor" for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
)


class _OfType(type):
    """As for torch's own, calling it makes a tensor, and ``isinstance`` asks for the dtype."""

    def __call__(cls, *data: Any) -> Any:
        return from_torch(getattr(torch, cls.__name__)(*data))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, getattr(torch, cls.__name__))


def typed(name: str) -> type:
    """The dtorch form of ``torch.<name>``."""
    return _OfType(
        name, (), {"__doc__": f"``torch.{name}``, uncommitted; ``dtorch.tensor(..., dtype=)`` takes a mesh."}
    )
