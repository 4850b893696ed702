"""Convolutions: the batch, output channels, input channels (a pending sum), or whole groups."""

from __future__ import annotations

import dataclasses

import torch

from ...placement import PARTIAL, REPLICATE, shard
from ..strategy import Call, Strategy, named, rule

aten = torch.ops.aten
P = PARTIAL


def _channels(call: Call) -> tuple[int, int]:
    """The weight's (output, input) channel dims."""
    return (1, 0) if call.get("transposed") else (0, 1)


def _batched(call: Call) -> bool:
    return call.get("input").ndim == call.get("weight").ndim


@rule(aten.convolution.default)
def convolution(call: Call) -> list[Strategy]:
    if not _batched(call):
        return []
    out, inner = map(shard, _channels(call))
    found = [named(call, (shard(0),), input=shard(0))]
    if call.get("groups") == 1:
        found.append(named(call, (shard(1),), weight=out, bias=shard(0)))
        found.append(named(call, (P,), input=shard(1), weight=inner, bias=P))
    else:
        groups = named(call, (shard(1),), input=shard(1), weight=shard(0), bias=shard(0))
        found.append(dataclasses.replace(groups, even=call.get("groups"), local="dtorch.convolution"))
    return [dataclasses.replace(s, nonempty=True) for s in found]


@rule(aten.convolution_backward.default, local_shapes={"bias_sizes": 2})
def convolution_backward(call: Call) -> list[Strategy]:
    if not _batched(call):
        return []
    out, inner = map(shard, _channels(call))
    b, c = shard(0), shard(1)
    found = [named(call, (b, P, P), grad_output=b, input=b)]
    if call.get("groups") == 1:
        found.append(named(call, (P, out, b), grad_output=c, weight=out))
        found.append(named(call, (c, inner, REPLICATE), input=c, weight=inner))
    else:
        groups = named(call, (c, b, b), grad_output=c, input=c, weight=b)
        found.append(dataclasses.replace(groups, even=call.get("groups"), local="dtorch.convolution_backward"))
    return [dataclasses.replace(s, nonempty=True) for s in found]
