"""Device functions of attention over a split sequence: one block of keys and values after another.

Softmax over blocks needs of what came before only its log-sum-exp: the outputs of two sets of keys are merged with weights
``exp(lse_i - lse)``, in float32 (float64 for float64).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..sharding.sequence import Task, wide
from .attention_block import Block, block_of, cut, dropped_of, grouped, heads_of, scores_of
from .registry import Here, device_function

aten = torch.ops.aten
Tensor = torch.Tensor


@device_function("dtorch.attention_block")
def attention_block(
    here: Here,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """Attend to the block of keys and values of this step, and merge that with what was found before.

    Args:
        out, lse: of the steps before; None at the first. They are changed.
        options: see `block_of`.
    """
    block = block_of(here, *options)
    if out is None or lse is None:
        kind = wide(query.dtype)
        out = query.new_zeros((*query.shape[:3], value.shape[-1]), dtype=kind)
        lse = query.new_full(query.shape[:3], -math.inf, dtype=kind)
    if not query.shape[0] * query.shape[1]:
        return out, lse
    for task in block.tasks():
        if block.is_fused(task, query, value):
            _merge(out, lse, task, *_fused(block, task, query, key, value))
        else:
            for part in block.chunks(task, query):
                _merge(out, lse, part, *_one_by_one(block, part, query, key, value))
    return out, lse


def _merge(out: Tensor, lse: Tensor, task: Task, more: Tensor, more_lse: Tensor) -> None:
    """Add what a task found to what its queries had; a query that has seen no key yet has ``lse = -inf``."""
    rows = slice(*task.queries)
    before = lse[:, :, rows]
    both = torch.logaddexp(before, more_lse.to(lse.dtype))
    # Where nothing was seen before or now, what -inf - -inf would give is to be 0.
    top = both.masked_fill(both == -math.inf, 0.0)
    found = out[:, :, rows]
    found.mul_((before - top).exp_().unsqueeze(-1)).add_(more.to(out.dtype) * (more_lse - top).exp_().unsqueeze(-1))
    before.copy_(both)


def _fused(block: Block, task: Task, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    _, index = block.shared_heads(key)
    key, value = (heads_of(cut(t, task.keys), index) for t in (key, value))
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        cut(query, task.queries), key, value, 0.0, task.diagonal is not None, scale=block.scale
    )


def _one_by_one(block: Block, task: Task, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    group, index = block.shared_heads(key)
    kind = wide(query.dtype)
    key, value = (heads_of(cut(t, task.keys), index).to(kind) for t in (key, value))
    scores = scores_of(block, task, grouped(cut(query, task.queries), group), key)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill_(top == -math.inf, 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + top).squeeze(-1)
    weights = dropped_of(block, task, weights.div_(total.masked_fill(total == 0, 1.0)))
    batch, heads, rows, columns = weights.shape
    out = torch.matmul(weights.reshape(batch, heads // group, group * rows, columns), value)
    return out.view(batch, heads, rows, value.shape[-1]), lse


@device_function("dtorch.attention_part")
def attention_part(here: Here, out: Tensor, lse: Tensor) -> Tensor:
    """Output and log-sum-exp as one tensor, for one transfer: (batch, heads, queries, features + 1)."""
    return torch.cat([out, lse.unsqueeze(-1)], -1)


@device_function("dtorch.attention_merge")
def attention_merge(here: Here, parts: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of all keys. ``parts``, found at each place: (batch, heads, places × queries, features + 1)."""
    outs, lses = parts.unflatten(2, (places, parts.shape[2] // places)).split([parts.shape[3] - 1, 1], -1)
    lse = lses.logsumexp(2)
    # What has seen no key at all has a log-sum-exp of -inf, and weights of 0.
    weights = (lses - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(2)).exp_()
    return (outs * weights).sum(2), lse.squeeze(-1)


@device_function("dtorch.attention_finish")
def attention_finish(here: Here, out: Tensor, dtype: torch.dtype, order: Sequence[int]) -> Tensor:
    """The output in its own type, its dims in ``order`` of memory."""
    inverse = [list(order).index(dim) for dim in range(out.ndim)]
    made = torch.empty([out.shape[dim] for dim in order], dtype=dtype, device=out.device).permute(inverse)
    return made.copy_(out)
