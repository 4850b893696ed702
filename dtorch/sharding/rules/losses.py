"""Losses: reduced over a sharded dim they are pending sums; a mean divides by the count of the whole."""

from __future__ import annotations

import dataclasses

import torch

from ...placement import PARTIAL, REPLICATE, shard
from ..strategy import Call, Strategy, named, rule
from .pointwise import broadcast, shards

aten = torch.ops.aten
R, P = REPLICATE, PARTIAL
NONE, MEAN, SUM = 0, 1, 2

#: Pointwise losses with a reduction; each has a device function for the mean, "dtorch.mean_of.<name>".
POINTWISE_LOSSES = {
    aten.mse_loss.default: "mse_loss",
    aten.smooth_l1_loss.default: "smooth_l1_loss",
    aten.huber_loss.default: "huber_loss",
    aten.binary_cross_entropy.default: "binary_cross_entropy",
    aten.binary_cross_entropy_with_logits.default: "binary_cross_entropy_with_logits",
    aten.soft_margin_loss.default: "soft_margin_loss",
}

#: Their backwards; the device functions are "dtorch.mean_of.<name>".
POINTWISE_LOSS_BACKWARDS = {
    aten.mse_loss_backward.default: "mse_loss_backward",
    aten.smooth_l1_loss_backward.default: "smooth_l1_loss_backward",
    aten.huber_loss_backward.default: "huber_loss_backward",
    aten.binary_cross_entropy_backward.default: "binary_cross_entropy_backward",
    aten.soft_margin_loss_backward.default: "soft_margin_loss_backward",
}


@rule(*POINTWISE_LOSSES)
def loss(call: Call) -> list[Strategy]:
    reduction = call.get("reduction")
    if reduction == NONE:
        return shards(call)
    shape = torch.broadcast_shapes(*[t.shape for t in call.inputs[:2]])
    if reduction == SUM and call.outputs[0].dtype == torch.float16:  # type: ignore[union-attr]
        return []
    local = f"dtorch.mean_of.{POINTWISE_LOSSES[call.op]}" if reduction == MEAN else None
    return [
        Strategy(tuple([broadcast(t, d, shape) for t in call.inputs]), (P,), local=local) for d in range(len(shape))
    ]


@rule(*POINTWISE_LOSS_BACKWARDS)
def loss_backward(call: Call) -> list[Strategy]:
    """The gradient of a reduced loss is one number."""
    local = f"dtorch.mean_of.{POINTWISE_LOSS_BACKWARDS[call.op]}" if call.get("reduction") == MEAN else None
    return [dataclasses.replace(s, local=local) for s in shards(call)]


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(call: Call) -> list[Strategy]:
    """(scores [N, C, ...], target [N, ...]). The mean divides the whole sum by the whole weight once both are known."""
    scores = call.get("self")
    if scores.ndim < 2:
        return []
    reduction = call.get("reduction")
    # The pending sum of losses of a half would overflow.
    if reduction != NONE and scores.dtype == torch.float16:
        return []
    found = []
    for d in range(scores.ndim):
        if d == 1:
            continue
        own = shard(d - (d > 1))
        outputs = (own, R) if reduction == NONE else (P, P)
        strategy = named(call, outputs, self=shard(d), target=own)
        if reduction == MEAN:
            strategy = dataclasses.replace(strategy, local="dtorch.nll_loss_sum", finish="dtorch.nll_loss_mean")
        found.append(strategy)
    return found


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(call: Call) -> list[Strategy]:
    """It takes the whole weight as an argument, so parts need no correction."""
    scores = call.get("self")
    if scores.ndim < 2:
        return []
    found = []
    for d in range(scores.ndim):
        if d != 1:
            own = shard(d - (d > 1))
            grad = own if call.get("grad_output").ndim else R
            found.append(named(call, (shard(d),), grad_output=grad, self=shard(d), target=own))
    return found
