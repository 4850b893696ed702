"""Scaled dot product attention: batch, heads and, without a causal mask, the queries."""

from __future__ import annotations

import dataclasses

import torch

from ...placement import PARTIAL, REPLICATE, Placement, shard
from ..strategy import Call, Strategy, named, rule
from .pointwise import broadcast

aten = torch.ops.aten
R, P = REPLICATE, PARTIAL


def _mask(call: Call, dim: int) -> Placement:
    """How the mask lies if ``dim`` of the (batch, heads, queries, keys) scores is sharded."""
    mask = call.get("attn_mask")
    q, k = call.get("query"), call.get("key")
    return R if mask is None else broadcast(mask, dim, (*q.shape[:3], k.shape[2]))


def _heads_even(call: Call) -> int | None:
    """Fewer key heads than query heads: only whole groups may be split, so that query and key heads stay together."""
    q, k = call.get("query"), call.get("key")
    return None if q.shape[1] == k.shape[1] else k.shape[1]


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default, by_shards=True)
def attention(call: Call) -> list[Strategy]:
    found = []
    for d in (0, 1):
        s = shard(d)
        strategy = named(call, (s, s), query=s, key=s, value=s, attn_mask=_mask(call, d))
        found.append(dataclasses.replace(strategy, nonempty=True, even=_heads_even(call) if d else None))
    if not call.get("is_causal"):
        s = shard(2)
        found.append(dataclasses.replace(named(call, (s, s), query=s, attn_mask=_mask(call, 2)), nonempty=True))
    return found


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, by_shards=True)
def attention_backward(call: Call) -> list[Strategy]:
    found = []
    for d in (0, 1):
        s = shard(d)
        strategy = named(
            call, (s, s, s), grad_out=s, query=s, key=s, value=s, out=s, logsumexp=s, attn_mask=_mask(call, d)
        )
        found.append(dataclasses.replace(strategy, nonempty=True, even=_heads_even(call) if d else None))
    if not call.get("is_causal"):
        s = shard(2)
        strategy = named(call, (s, P, P), grad_out=s, query=s, out=s, logsumexp=s, attn_mask=_mask(call, 2))
        found.append(dataclasses.replace(strategy, nonempty=True))
    return found
