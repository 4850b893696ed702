"""Device functions of attention over a split sequence: one block of keys and values after another.

Softmax over blocks needs of what came before only its log-sum-exp: the outputs of two sets of keys are merged with weights
``exp(lse_i - lse)``, in float32 (float64 for float64). The backward recomputes the probabilities of a block as ``exp(score - lse)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..program.ir import Roles
from ..sharding.sequence import (
    Sizes,
    Task,
    at_ring_place,
    boxes,
    head_range,
    key_ranges,
    kv_head_range,
    query_ranges,
    ring_place,
    step_tasks,
    wide,
)
from .random import words
from .registry import Here, device_function

aten = torch.ops.aten
Tensor = torch.Tensor

#: Scores computed at once, at most, where they are computed one by one: 16 MB in float32.
_SCORES = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class _Block:
    """A device's queries against one block of keys: everything but the tensors that travel."""

    here: Here
    roles: Roles
    sizes: Sizes
    is_causal: bool
    step: int
    scale: float
    mask: Tensor | None
    dropout: float
    #: The dropout's key, or which scores it keeps.
    keep: int | Tensor | None

    def tasks(self) -> list[Task]:
        at = self.here
        return step_tasks(self.roles, self.is_causal, self.sizes, at.mesh.shape, at.coordinate, self.step)

    def is_fused(self, task: Task, query: Tensor, value: Tensor) -> bool:
        """Whether torch's fused kernel can compute it."""
        return (
            self.mask is None
            and not self.dropout
            and task.diagonal in (None, 0)
            and query.shape[-1] == value.shape[-1]
            and query.device.type == "cpu"
        )

    def shared_heads(self, key: Tensor) -> tuple[int, Tensor | None]:
        """How many query heads share a key head here; or, where some key heads have fewer than others, the one of each."""
        at, group = self.here, self.sizes.heads // self.sizes.kv_heads
        start, stop = head_range(self.roles, self.sizes, at.mesh.shape, at.coordinate)
        first, _ = kv_head_range(self.roles, self.sizes, at.mesh.shape, at.coordinate)
        if (stop - start) == key.shape[1] * group:
            return group, None
        if key.shape[1] == 1:
            return stop - start, None
        return 1, torch.arange(start, stop, device=key.device) // group - first

    def kept(self, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor | None:
        """What dropout keeps of the scores of these local queries and keys."""
        if not self.dropout:
            return None
        at, sizes = self.here, self.sizes
        queries = query_ranges(self.roles, self.is_causal, sizes, at.mesh.shape, at.coordinate)
        keys = self._key_ranges()
        if isinstance(self.keep, Tensor):
            parts = [self.keep[:, :, rows[0] : rows[1], a:b] for a, b in _within(columns, keys)]
            return torch.cat(parts, -1)
        whole = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        (batch, heads, *_) = boxes("query", self.roles, False, sizes, at.mesh.shape, at.coordinate, whole)[0]
        unit = [
            torch.cat([_unit(self.keep, whole, (batch, heads, r, c)) for c in _within(columns, keys)], -1)
            for r in _within(rows, queries)
        ]
        return (torch.cat(unit, -2) < 1.0 - self.dropout).to(at.device)

    def masked(self, columns: tuple[int, int], rows: tuple[int, int]) -> Tensor | None:
        """The mask of the scores of these local queries and keys."""
        mask = self.mask
        if mask is None:
            return None
        if mask.shape[2] > 1:
            mask = mask[:, :, rows[0] : rows[1]]
        if mask.shape[3] > 1:
            mask = torch.cat([mask[..., a:b] for a, b in _within(columns, self._key_ranges())], -1)
        return mask

    def _key_ranges(self) -> list[tuple[int, int]]:
        """Where the keys of the block at hand stand in the whole."""
        at = self.here
        _, place = ring_place(at.mesh.shape, at.coordinate, self.roles.ring)
        home = at_ring_place(at.mesh.shape, at.coordinate, self.roles.ring, place - self.step)
        return key_ranges(self.roles, self.is_causal, self.sizes, at.mesh.shape, home)

    def chunks(self, task: Task, query: Tensor) -> Iterator[Task]:
        """``task`` in pieces of few enough scores."""
        (start, stop), columns = task.queries, task.keys[1] - task.keys[0]
        rows = max(1, _SCORES // max(1, query.shape[0] * query.shape[1] * columns))
        for row in range(start, stop, rows):
            diagonal = None if task.diagonal is None else task.diagonal + row - start
            yield Task((row, min(row + rows, stop)), task.keys, diagonal)


def _within(local: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of the whole that the ``local`` range of ``ranges``, laid one behind the other, is."""
    at = 0
    for start, stop in ranges:
        low, high = max(local[0], at), min(local[1], at + stop - start)
        if low < high:
            yield start + low - at, start + high - at
        at += stop - start


def _unit(key: Any, shape: Sequence[int], box: Any) -> Tensor:
    """The uniform numbers that `dtorch.bernoulli` compares: the same elements are kept as where attention is not split."""
    raw = words(key, shape, box)[..., 0] >> 11
    return torch.from_numpy(raw.astype("float64") * 2.0**-53)


def _block(
    here: Here,
    axes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    is_causal: bool,
    step: int,
    scale: float,
    mask: Tensor | None,
    dropout: float,
    key: int | None,
    keep: Tensor | None,
) -> _Block:
    roles = Roles(*(tuple(a) for a in axes))
    return _Block(here, roles, Sizes(*sizes), is_causal, step, scale, mask, dropout, key if keep is None else keep)


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
        options: see `_block`.
    """
    block = _block(here, *options)
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


def _cut(tensor: Tensor, range_: tuple[int, int]) -> Tensor:
    part = tensor[:, :, range_[0] : range_[1]]
    return part if part.stride(-1) == 1 else part.contiguous()


def _heads(tensor: Tensor, index: Tensor | None) -> Tensor:
    return tensor if index is None else tensor.index_select(1, index)


def _fused(block: _Block, task: Task, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    _, index = block.shared_heads(key)
    key, value = (_heads(_cut(t, task.keys), index) for t in (key, value))
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        _cut(query, task.queries), key, value, 0.0, task.diagonal is not None, scale=block.scale
    )


def _scores(block: _Block, task: Task, query: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, queries, keys), scaled and masked; ``query`` and ``key`` are the task's, as `_grouped` gives them."""
    rows, columns = (end - start for start, end in (task.queries, task.keys))
    batch, groups = query.shape[:2]
    scores = torch.matmul(query, key.mT).view(batch, groups * (query.shape[2] // rows), rows, columns)
    scores = scores.mul_(block.scale)
    mask = block.masked(task.keys, task.queries)
    if task.diagonal is not None:
        hidden = torch.ones(rows, columns, dtype=torch.bool, device=query.device).triu_(task.diagonal + 1)
        scores.masked_fill_(hidden, -math.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask)
    return scores


def _grouped(tensor: Tensor, group: int) -> Tensor:
    """(batch, heads, rows, …) with the ``group`` query heads of each key head behind one another, in the wide type."""
    batch, heads, rows, size = tensor.shape
    return tensor.to(wide(tensor.dtype)).reshape(batch, heads // group, group * rows, size)


def _dropped(block: _Block, task: Task, probabilities: Tensor) -> Tensor:
    keep = block.kept(task.queries, task.keys)
    if keep is None:
        return probabilities
    factor = 0.0 if block.dropout == 1 else 1.0 / (1.0 - block.dropout)
    return probabilities * (keep.to(probabilities.dtype) * factor)


def _one_by_one(block: _Block, task: Task, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    group, index = block.shared_heads(key)
    kind = wide(query.dtype)
    key, value = (_heads(_cut(t, task.keys), index).to(kind) for t in (key, value))
    scores = _scores(block, task, _grouped(_cut(query, task.queries), group), key)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill_(top == -math.inf, 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    lse = (total.log() + top).squeeze(-1)
    weights = _dropped(block, task, weights.div_(total.masked_fill(total == 0, 1.0)))
    batch, heads, rows, columns = weights.shape
    out = torch.matmul(weights.reshape(batch, heads // group, group * rows, columns), value)
    return out.view(batch, heads, rows, value.shape[-1]), lse


@device_function("dtorch.attention_finish")
def attention_finish(here: Here, out: Tensor, dtype: torch.dtype, order: Sequence[int]) -> Tensor:
    """The output in its own type, its dims in ``order`` of memory."""
    inverse = [list(order).index(dim) for dim in range(out.ndim)]
    made = torch.empty([out.shape[dim] for dim in order], dtype=dtype, device=out.device).permute(inverse)
    return made.copy_(out)


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
        options: see `_block`.
    """
    block = _block(here, *options)
    kind = wide(query.dtype)
    if grad_query is None:
        grad_query = torch.zeros_like(query, dtype=kind, memory_format=torch.contiguous_format)
        if wants_mask:
            grad_mask = torch.zeros_like(block.mask, dtype=kind, memory_format=torch.contiguous_format)  # type: ignore[arg-type]
    grads = grad_query, *(torch.zeros(t.shape, dtype=kind, device=t.device) for t in (key, value)), grad_mask
    if query.shape[0] * query.shape[1]:
        for task in block.tasks():
            if block.is_fused(task, query, value):
                _fused_backward(block, task, query, key, value, out, lse, grad, grads)
            else:
                for part in block.chunks(task, query):
                    _one_by_one_backward(block, part, query, key, value, out, lse, grad, grads)
    return grads


def _add_heads(target: Tensor, range_: tuple[int, int], part: Tensor, index: Tensor | None) -> None:
    """Add ``part``, which has a head for each of ``index``, to those heads."""
    rows = target[:, :, range_[0] : range_[1]]
    if index is None:
        rows.add_(part)
    else:
        rows.index_add_(1, index, part.to(target.dtype))


def _fused_backward(
    block: _Block,
    task: Task,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grads: tuple[Tensor | None, ...],
) -> None:
    _, index = block.shared_heads(key)
    key, value = (_heads(_cut(t, task.keys), index) for t in (key, value))
    query, out, grad = (_cut(t, task.queries) for t in (query, out, grad))
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
        grad, query, key, value, out, lse[:, :, slice(*task.queries)], 0.0, task.diagonal is not None, scale=block.scale
    )
    for total, range_, part, heads in zip(
        grads, (task.queries, task.keys, task.keys), found, (None, index, index), strict=False
    ):
        _add_heads(total, range_, part, heads)  # type: ignore[arg-type]


def _one_by_one_backward(
    block: _Block,
    task: Task,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grads: tuple[Tensor | None, ...],
) -> None:
    group, index = block.shared_heads(key)
    kind = wide(query.dtype)
    key, value = (_heads(_cut(t, task.keys), index).to(kind) for t in (key, value))
    rows = task.queries
    queries, heads_grad = (_grouped(_cut(t, rows), group) for t in (query, grad))
    delta = (_cut(grad, rows).to(kind) * _cut(out, rows).to(kind)).sum(-1, keepdim=True)
    end = lse[:, :, slice(*rows)].unsqueeze(-1)
    probabilities = _scores(block, task, queries, key).sub_(end.masked_fill(end == -math.inf, math.inf)).exp_()
    batch, heads, height, columns = probabilities.shape
    flat = (batch, heads // group, group * height, columns)
    dropped = _dropped(block, task, probabilities)
    upstream = torch.matmul(heads_grad, value.mT).view(probabilities.shape)
    # P * (D * dP - delta), where D is what dropout multiplies by, and ``dropped`` is P * D.
    scores_grad = dropped * upstream - probabilities * delta
    grad_query, grad_key, grad_value, grad_mask = grads
    _add_heads(grad_value, task.keys, torch.matmul(dropped.reshape(flat).mT, heads_grad), index)  # type: ignore[arg-type]
    if grad_mask is not None:
        _add_mask(block, task, scores_grad, grad_mask)
    scores_grad = scores_grad.mul_(block.scale).reshape(flat)
    _add_heads(grad_key, task.keys, torch.matmul(scores_grad.mT, queries), index)  # type: ignore[arg-type]
    part = torch.matmul(scores_grad, key).view(batch, heads, height, query.shape[-1])
    _add_heads(grad_query, rows, part, None)  # type: ignore[arg-type]


def _add_mask(block: _Block, task: Task, scores_grad: Tensor, total: Tensor) -> None:
    """Add the gradient of the scores to the mask's, summed over the dims along which the mask is broadcast."""
    part = scores_grad.sum_to_size([1 if m == 1 else n for m, n in zip(total.shape, scores_grad.shape, strict=True)])
    rows = total if total.shape[2] == 1 else total[:, :, task.queries[0] : task.queries[1]]
    if total.shape[3] == 1:
        rows.add_(part)
        return
    at = 0
    for start, stop in _within(task.keys, block._key_ranges()):
        rows[..., start:stop].add_(part[..., at : at + stop - start])
        at += stop - start


@device_function("dtorch.attention_add")
def attention_add(here: Here, total: Tensor, more: Tensor) -> Tensor:
    """``total + more``, where what has travelled is: each device adds its gradient of a block as it passes."""
    return total.add_(more)
