"""The table of sharding rules, one module a family of ops. Importing this fills `dtorch.sharding.strategy.RULES`."""

from __future__ import annotations

import torch

from ..strategy import RULES, RuleEntry
from . import (  # noqa: F401
    attention,
    convolution,
    factories,
    foreach,
    images,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    reduce,
    views,
)

#: Arguments of Scalar type whose value decides placements: part of a plan's key.
STATIC_NUMBERS: dict[torch._ops.OpOverload, frozenset[str]] = {
    **reduce.STATIC_NUMBERS,
    **foreach.STATIC_NUMBERS,
}


def rule_for(op: torch._ops.OpOverload) -> RuleEntry | None:
    """The rule of ``op``, or None: then its inputs are gathered and it runs replicated."""
    found = RULES.get(op)
    if found is None and torch.Tag.pointwise in op.tags and op not in pointwise.NOT_POINTWISE:
        return pointwise.ENTRY
    return found
