"""The table of sharding rules, one module a family of ops. Importing this fills `dtorch.sharding.strategy.RULES`."""

from __future__ import annotations

import torch

from ..strategy import RULES, RuleEntry
from . import pointwise


def rule_for(op: torch._ops.OpOverload) -> RuleEntry | None:
    """The rule of ``op``, or None: then its inputs are gathered and it runs replicated."""
    found = RULES.get(op)
    if found is None and torch.Tag.pointwise in op.tags and op not in pointwise.NOT_POINTWISE:
        found = RULES[op] = pointwise.ENTRY
    return found
