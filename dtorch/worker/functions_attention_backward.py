"""Device functions of attention's backward over a split sequence: the probabilities of a block are computed again: ``exp(score - lse)``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..sharding.sequence import Task, wide
from .attention_block import Block, block_of, cut, dropped_of, grouped, heads_of, scores_of, within
from .registry import Here, device_function

aten = torch.ops.aten
Tensor = torch.Tensor


@device_function("dtorch.attention_block_backward")
def attention_block_backward(
    here: Here,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_query: Tensor | None,
    grad_mask: Tensor | None,
    wants_mask: bool,
    *options: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients of one step: of queries and mask added to what was there, of the block's keys and values by themselves.

    Args:
        out, lse, grad: the output of all steps, its log-sum-exp and its gradient.
        grad_query, grad_mask: of the steps before; None at the first. They are changed.
        wants_mask: whether the mask has a gradient.
        options: see `block_of`.
    """
    block = block_of(here, *options)
    kind = wide(query.dtype)
    if grad_query is None:
        grad_query = torch.zeros_like(query, dtype=kind, memory_format=torch.contiguous_format)
        if wants_mask:
            grad_mask = torch.zeros_like(block.mask, dtype=kind, memory_format=torch.contiguous_format)  # type: ignore[arg-type]
    grad_key, grad_value = (torch.zeros(t.shape, dtype=kind, device=t.device) for t in (key, value))
    step = _Step(block, query, key, value, out, lse, grad, grad_query, grad_key, grad_value, grad_mask)
    if query.shape[0] * query.shape[1]:
        for task in block.tasks():
            if block.is_fused(task, query, value):
                step.fused(task)
            else:
                for part in block.chunks(task, query):
                    step.one_by_one(part)
    return grad_query, grad_key, grad_value, grad_mask


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """What the backward of one block is given, and the gradients that it adds to."""

    block: Block
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    grad_mask: Tensor | None

    def fused(self, task: Task) -> None:
        _, index = self.block.shared_heads(self.key)
        key, value = (heads_of(cut(t, task.keys), index) for t in (self.key, self.value))
        query, out, grad = (cut(t, task.queries) for t in (self.query, self.out, self.grad))
        lse, is_causal = self.lse[:, :, slice(*task.queries)], task.diagonal is not None
        of_query, of_key, of_value = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, query, key, value, out, lse, 0.0, is_causal, scale=self.block.scale
        )
        _add_heads(self.grad_query, task.queries, of_query, None)
        _add_heads(self.grad_key, task.keys, of_key, index)
        _add_heads(self.grad_value, task.keys, of_value, index)

    def one_by_one(self, task: Task) -> None:
        block, rows = self.block, task.queries
        group, index = block.shared_heads(self.key)
        kind = wide(self.query.dtype)
        key, value = (heads_of(cut(t, task.keys), index).to(kind) for t in (self.key, self.value))
        queries, heads_grad = (grouped(cut(t, rows), group) for t in (self.query, self.grad))
        delta = (cut(self.grad, rows).to(kind) * cut(self.out, rows).to(kind)).sum(-1, keepdim=True)
        end = self.lse[:, :, slice(*rows)].unsqueeze(-1)
        probabilities = scores_of(block, task, queries, key).sub_(end.masked_fill(end == -math.inf, math.inf)).exp_()
        batch, heads, height, columns = probabilities.shape
        flat = (batch, heads // group, group * height, columns)
        dropped = dropped_of(block, task, probabilities)
        upstream = torch.matmul(heads_grad, value.mT).view(probabilities.shape)
        # P * (D * dP - delta), where D is what dropout multiplies by, and ``dropped`` is P * D.
        scores_grad = dropped * upstream - probabilities * delta
        _add_heads(self.grad_value, task.keys, torch.matmul(dropped.reshape(flat).mT, heads_grad), index)
        if self.grad_mask is not None:
            _add_mask(block, task, scores_grad, self.grad_mask)
        scores_grad = scores_grad.mul_(block.scale).reshape(flat)
        _add_heads(self.grad_key, task.keys, torch.matmul(scores_grad.mT, queries), index)
        part = torch.matmul(scores_grad, key).view(batch, heads, height, queries.shape[-1])
        _add_heads(self.grad_query, rows, part, None)


def _add_heads(target: Tensor, range_: tuple[int, int], part: Tensor, index: Tensor | None) -> None:
    """Add ``part``, which has a head for each of ``index``, to those heads."""
    rows = target[:, :, range_[0] : range_[1]]
    if index is None:
        rows.add_(part)
    else:
        rows.index_add_(1, index, part.to(target.dtype))


def _add_mask(block: Block, task: Task, scores_grad: Tensor, total: Tensor) -> None:
    """Add the gradient of the scores to the mask's, summed over the dims along which the mask is broadcast."""
    part = scores_grad.sum_to_size([1 if m == 1 else n for m, n in zip(total.shape, scores_grad.shape, strict=True)])
    rows = total if total.shape[2] == 1 else total[:, :, task.queries[0] : task.queries[1]]
    if total.shape[3] == 1:
        rows.add_(part)
        return
    at = 0
    for start, stop in within(task.keys, block.key_ranges()):
        rows[..., start:stop].add_(part[..., at : at + stop - start])
        at += stop - start


@device_function("dtorch.attention_add")
def attention_add(here: Here, total: Tensor, more: Tensor) -> Tensor:
    """``total + more``, where what has travelled is: each device adds its gradient of a block as it passes."""
    return total.add_(more)
