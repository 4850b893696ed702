"""A device's queries against one block of keys: which scores, how they are masked and dropped, which heads share keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..program.ir import Roles
from ..sharding import sequence
from ..sharding.sequence import (
    Sizes,
    Task,
    at_ring_place,
    boxes,
    head_range,
    kv_head_range,
    query_ranges,
    ring_place,
    step_tasks,
    wide,
)
from .random import words
from .registry import Here

Tensor = torch.Tensor

#: Scores computed at once, at most, where they are computed one by one: 16 MB in float32.
_SCORES = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
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
        keys = self.key_ranges()
        if isinstance(self.keep, Tensor):
            parts = [self.keep[:, :, rows[0] : rows[1], a:b] for a, b in within(columns, keys)]
            return torch.cat(parts, -1)
        whole = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        (batch, heads, *_) = boxes("query", self.roles, False, sizes, at.mesh.shape, at.coordinate, whole)[0]
        unit = [
            torch.cat([_unit(self.keep, whole, (batch, heads, r, c)) for c in within(columns, keys)], -1)
            for r in within(rows, queries)
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
            mask = torch.cat([mask[..., a:b] for a, b in within(columns, self.key_ranges())], -1)
        return mask

    def key_ranges(self) -> list[tuple[int, int]]:
        """Where the keys of the block at hand stand in the whole."""
        at = self.here
        _, place = ring_place(at.mesh.shape, at.coordinate, self.roles.ring)
        home = at_ring_place(at.mesh.shape, at.coordinate, self.roles.ring, place - self.step)
        return sequence.key_ranges(self.roles, self.is_causal, self.sizes, at.mesh.shape, home)

    def chunks(self, task: Task, query: Tensor) -> Iterator[Task]:
        """``task`` in pieces of few enough scores."""
        (start, stop), columns = task.queries, task.keys[1] - task.keys[0]
        rows = max(1, _SCORES // max(1, query.shape[0] * query.shape[1] * columns))
        for row in range(start, stop, rows):
            diagonal = None if task.diagonal is None else task.diagonal + row - start
            yield Task((row, min(row + rows, stop)), task.keys, diagonal)


def within(local: tuple[int, int], ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
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


def block_of(
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
) -> Block:
    roles = Roles(*(tuple(a) for a in axes))
    return Block(here, roles, Sizes(*sizes), is_causal, step, scale, mask, dropout, key if keep is None else keep)


def cut(tensor: Tensor, range_: tuple[int, int]) -> Tensor:
    part = tensor[:, :, range_[0] : range_[1]]
    return part if part.stride(-1) == 1 else part.contiguous()


def heads_of(tensor: Tensor, index: Tensor | None) -> Tensor:
    return tensor if index is None else tensor.index_select(1, index)


def scores_of(block: Block, task: Task, query: Tensor, key: Tensor) -> Tensor:
    """(batch, heads, queries, keys), scaled and masked; ``query`` and ``key`` are the task's, as `grouped` gives them."""
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


def grouped(tensor: Tensor, group: int) -> Tensor:
    """(batch, heads, rows, …) with the ``group`` query heads of each key head behind one another, in the wide type."""
    batch, heads, rows, size = tensor.shape
    return tensor.to(wide(tensor.dtype)).reshape(batch, heads // group, group * rows, size)


def dropped_of(block: Block, task: Task, probabilities: Tensor) -> Tensor:
    keep = block.kept(task.queries, task.keys)
    if keep is None:
        return probabilities
    factor = 0.0 if block.dropout == 1 else 1.0 / (1.0 - block.dropout)
    return probabilities * (keep.to(probabilities.dtype) * factor)
