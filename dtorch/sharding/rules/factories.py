"""Tensors made after another: those of its shape follow its sharding, the others are replicated; its values do not matter."""

from __future__ import annotations

import torch

from ...placement import PARTIAL, REPLICATE, shard
from ..strategy import Call, Strategy, rule

aten = torch.ops.aten


@rule(aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
def like(call: Call) -> list[Strategy]:
    found = [Strategy((shard(d),), (shard(d),)) for d in range(call.inputs[0].ndim)]
    return [*found, Strategy((PARTIAL,), (REPLICATE,))]


def _new(call: Call, local: str | None = None) -> list[Strategy]:
    x = call.inputs[0]
    same = call.outputs[0].shape == x.shape  # type: ignore[union-attr]
    found = [Strategy((shard(d),), (shard(d) if same else REPLICATE,), local=local) for d in range(x.ndim)]
    return [*found, Strategy((PARTIAL,), (REPLICATE,), local=local)]


@rule(
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    local_shapes={"size": 0},
)
def new(call: Call) -> list[Strategy]:
    return _new(call)


@rule(aten.new_empty_strided.default, local_shapes={"size": 0})
def new_empty_strided(call: Call) -> list[Strategy]:
    """Its strides are the whole's, so a device function makes those of the part."""
    return _new(call, "dtorch.new_empty_strided")
