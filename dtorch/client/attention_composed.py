"""Attention made of ops that have gradients of gradients: what the backward of a backward needs.

The scores are one tensor here, split like the queries; keys and values are whole on every device while it runs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..sharding.roles import whole_features
from ..sharding.sequence import wide
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import host, random_ops

aten = torch.ops.aten


def gradients(
    tensors: list[Tensor], keep: Tensor | None, grad: Tensor, wanted: list[bool], is_causal: bool, numbers: Any
) -> list[Tensor | None]:
    """Of query, key, value and, if there is one, mask, as far as ``wanted``; each with a graph behind it.

    Args:
        keep: which scores dropout keeps; None: they are drawn from its key.
        numbers: scale, dropout, and its key.
    """
    own = [t.view_as(t) for t in tensors]  # query, key and value may be one tensor
    asked = [t for t, is_wanted in zip(own, wanted, strict=True) if is_wanted]
    found = iter(torch.autograd.grad(_attend(own, keep, is_causal, *numbers), asked, grad, create_graph=True))
    return [next(found) if is_wanted else None for is_wanted in wanted]


def _attend(
    tensors: list[Tensor], keep: Tensor | None, is_causal: bool, scale: float, dropout: float, number: int
) -> torch.Tensor:
    query, key, value = tensors[:3]
    mesh, kind, group = query._spec.mesh, wide(query.dtype), query.shape[1] // key.shape[1]
    k, v = (t.to(kind).repeat_interleave(group, 1) if group > 1 else t.to(kind) for t in (key, value))
    scores = torch.matmul(query.to(kind) * scale, k.mT)
    shape = scores.shape
    if is_causal:
        hidden = torch.ones(shape[2:], dtype=torch.bool, device="cpu").triu_(1)
        scores = scores.masked_fill(host.from_plain(hidden, mesh), -math.inf)
    for mask in tensors[3:]:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = aten._safe_softmax(scores, -1)
    if dropout:
        if keep is None:
            spec = Spec.of(mesh, whole_features(query._spec).placements, shape, None, kind)
            keep = random_ops.generate(aten.bernoulli_.float, [1.0 - dropout], spec, number)
        weights = weights * (keep.to(kind) * (0.0 if dropout == 1 else 1.0 / (1.0 - dropout)))
    return torch.matmul(weights, v).to(query.dtype)
