"""Attention reads its inputs as they lie in memory: expanded, transposed and sliced ones, wherever their parts have to go first."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

pytestmark = pytest.mark.usefixtures("simulated")

MESH = DeviceMesh("cpu", [0, 1])
PLACEMENTS = (Replicate(), Shard(0), Shard(1), Shard(2), Shard(3))
#: Shapes, and views of them of (2, 4, 6, 8).
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "contiguous": ((2, 4, 6, 8), lambda t: t),
    "one head for all": ((2, 1, 6, 8), lambda t: t.expand(2, 4, 6, 8)),
    "one batch for all": ((1, 4, 6, 8), lambda t: t.expand(2, 4, 6, 8)),
    "one of each": ((1, 1, 6, 8), lambda t: t.expand(2, 4, 6, 8)),
    "one row": ((2, 4, 1, 8), lambda t: t.expand(2, 4, 6, 8)),
    "one feature": ((2, 4, 6, 1), lambda t: t.expand(2, 4, 6, 8)),
    "heads behind rows": ((2, 6, 4, 8), lambda t: t.transpose(1, 2)),
    "heads behind rows, one for all": ((2, 6, 1, 8), lambda t: t.transpose(1, 2).expand(2, 4, 6, 8)),
    "features before rows": ((2, 4, 8, 6), lambda t: t.mT),
    "every other feature": ((2, 4, 6, 16), lambda t: t[..., ::2]),
    "a part of the heads": ((2, 7, 6, 8), lambda t: t[:, 2:6]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_values_and_gradients(layout: str, is_causal: bool) -> None:
    shape, view = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(s, generator=generator) for s in ((2, 4, 5, 8), shape, shape))
    gradient = torch.randn(2, 4, 5, 8, generator=generator)
    given = [t.requires_grad_() for t in (query, key, value)]
    expected = scaled_dot_product_attention(query, view(key), view(value), is_causal=is_causal)
    gradients = torch.autograd.grad(expected, given, gradient)
    for of_query, of_keys in itertools.product(PLACEMENTS, PLACEMENTS):
        placements = [of_query, of_keys, of_keys]
        ours = [
            dtorch.distribute_tensor(t.detach(), MESH, [p]).requires_grad_()
            for t, p in zip(given, placements, strict=True)
        ]
        keys, values = view(ours[1]), view(ours[2])
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                found = scaled_dot_product_attention(ours[0], keys, values, is_causal=is_causal)
                torch.testing.assert_close(found.to_torch(), expected.detach(), msg=f"{of_query} {of_keys} {mode}")
        found = scaled_dot_product_attention(ours[0], keys, values, is_causal=is_causal)
        placed = dtorch.distribute_tensor(gradient, MESH, found.placements)
        for one, other in zip(torch.autograd.grad(found, ours, placed), gradients, strict=True):
            torch.testing.assert_close(one.to_torch(), other)
