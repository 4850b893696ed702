"""Softmax and normalisation layers: all dims but the normalised ones are batch dims; weights' gradients are pending sums."""

from __future__ import annotations

import dataclasses

import torch

from ...placement import PARTIAL, REPLICATE, Placement, shard
from ..strategy import Call, Strategy, everywhere, named, rule

aten = torch.ops.aten
R, P = REPLICATE, PARTIAL


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default, by_form=True)
def softmax(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    return [everywhere(shard(d), call) for d in range(ndim) if d != call.get("dim") % ndim]


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default, by_form=True)
def softmax_backward(call: Call) -> list[Strategy]:
    return softmax(call)


def _batch_dims(call: Call) -> range:
    return range(call.get("input").ndim - len(call.get("normalized_shape")))


@rule(
    aten.native_layer_norm.default,
    aten._fused_rms_norm.default,
    aten.rms_norm.default,
    aten.layer_norm.default,
    by_form=True,
)
def layer_norm(call: Call) -> list[Strategy]:
    count = len(call.outputs)
    return [named(call, (shard(d),) * count, input=shard(d)) for d in _batch_dims(call)]


@rule(aten.native_layer_norm_backward.default, by_form=True)
def layer_norm_backward(call: Call) -> list[Strategy]:
    return [named(call, (s, P, P), grad_out=s, input=s, mean=s, rstd=s) for s in map(shard, _batch_dims(call))]


@rule(aten.native_group_norm.default)
def group_norm(call: Call) -> list[Strategy]:
    """The batch, or whole groups of channels; N, C and the number of groups are arguments, so a device function counts its own."""
    batch = named(call, (shard(0),) * 3, input=shard(0))
    groups = named(call, (shard(1),) * 3, input=shard(1), weight=shard(0), bias=shard(0))
    return _grouped(call, batch, groups, "dtorch.native_group_norm")


@rule(aten.native_group_norm_backward.default)
def group_norm_backward(call: Call) -> list[Strategy]:
    s, c = shard(0), shard(1)
    batch = named(call, (s, P, P), grad_out=s, input=s, mean=s, rstd=s)
    groups = named(call, (c, s, s), grad_out=c, input=c, mean=c, rstd=c, weight=s)
    return _grouped(call, batch, groups, "dtorch.native_group_norm_backward")


def _grouped(call: Call, batch: Strategy, groups: Strategy, local: str) -> list[Strategy]:
    if call.get("input").ndim < 2:
        return []
    return [
        dataclasses.replace(batch, nonempty=True, local=local),
        dataclasses.replace(groups, nonempty=True, local=local, even=call.get("group")),
    ]


@rule(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default,
)
def batch_norm(call: Call) -> list[Strategy]:
    """Channels; the other dims only with fixed statistics, for those of a batch are over all of it."""
    x = call.get("input")
    channels = x.shape[1]
    outputs = [
        R if o is None else shard(1) if i == 0 else shard(0) if o.shape == (channels,) else R
        for i, o in enumerate(call.outputs)
    ]
    found = [_per_channel(call, tuple(outputs), channels)]
    training = call.op is aten._batch_norm_with_update.default or call.get("training")
    if not training:
        rest = (R,) * (len(outputs) - 1)
        found += [named(call, (shard(d), *rest), input=shard(d)) for d in range(x.ndim) if d != 1]
    return [dataclasses.replace(s, nonempty=True) for s in found]


def _per_channel(call: Call, outputs: tuple[Placement, ...], channels: int) -> Strategy:
    """Inputs of one number a channel are split with the channels; saved statistics that are empty are not."""
    inputs = tuple([shard(1) if t.ndim > 1 else shard(0) if t.shape == (channels,) else R for t in call.inputs])
    return Strategy(inputs, tuple([None if o is None else p for o, p in zip(call.outputs, outputs, strict=True)]))


@rule(aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)
def batch_norm_backward(call: Call) -> list[Strategy]:
    x = call.get("input")
    found = [_per_channel(call, (shard(1), shard(0), shard(0)), x.shape[1])]
    if not call.get("train" if call.op is aten.native_batch_norm_backward.default else "update"):
        found += [named(call, (shard(d), P, P), grad_out=shard(d), input=shard(d)) for d in range(x.ndim) if d != 1]
    return [dataclasses.replace(s, nonempty=True) for s in found]
