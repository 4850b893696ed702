"""Pointwise ops: any dim may be sharded; sums pass through linear ones."""

from __future__ import annotations

import torch

from ...placement import PARTIAL, REPLICATE, Placement, shard
from ..strategy import Call, RuleEntry, Strategy, TensorArg, rule

aten = torch.ops.aten

#: Tagged pointwise by torch, but not pointwise (equal) or random (rrelu).
NOT_POINTWISE = frozenset({aten.equal.default, aten.rrelu.default})


def pointwise(call: Call) -> list[Strategy]:
    """Each dim of the output; an input that broadcasts along it is replicated."""
    shape = next(o for o in call.outputs if o is not None).shape
    outputs = call.outputs
    found = []
    for dim in range(len(shape)):
        placed = shard(dim)
        inputs = tuple([_broadcast(t, dim, shape) for t in call.inputs])
        found.append(Strategy(inputs, tuple([None if o is None else placed for o in outputs])))
    return found


ENTRY = RuleEntry(pointwise, {})


def _broadcast(tensor: TensorArg, dim: int, shape: tuple[int, ...]) -> Placement:
    own = dim - (len(shape) - len(tensor.shape))
    return REPLICATE if own < 0 or tensor.shape[own] != shape[dim] else shard(own)


def _linear(call: Call, *partial: int) -> Strategy:
    """Pending sums for the inputs at ``partial`` give pending sums; the others are replicated."""
    inputs = tuple(PARTIAL if i in partial else REPLICATE for i in range(len(call.inputs)))
    return Strategy(inputs, tuple(None if o is None else PARTIAL for o in call.outputs))


def _keeps_sums(call: Call) -> bool:
    """Whether addends may be computed in the output's type: integers and bools round each addend, narrower floats round more often."""
    out = call.outputs[0]
    assert out is not None
    for t in call.inputs:
        if out.dtype == torch.bool or t.dtype == torch.bool:
            return False
    return True
