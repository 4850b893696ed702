"""Gradients of gradients of attention over a split sequence, as a penalty on gradients needs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate

from .compare import MESHES

pytestmark = pytest.mark.usefixtures("simulated")

sdpa = torch.nn.functional.scaled_dot_product_attention
GENERATOR = torch.Generator().manual_seed(2)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {"enable_gqa": True},
    "boolean mask": {"attn_mask": torch.rand(7, 7, generator=GENERATOR) > 0.3},
    "float mask": {"attn_mask": torch.randn(2, 1, 7, 7, generator=GENERATOR, dtype=torch.float64)},
    "scale": {"scale": 0.2},
}


def draw(kv_heads: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, 7, 4, generator=generator, dtype=torch.float64) for heads in (4, kv_heads, kv_heads)]


def twice(leaves: list[torch.Tensor], inputs: list[torch.Tensor], options: dict[str, Any]) -> list[torch.Tensor]:
    with torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):  # plain torch's fused kernel has no second gradient
        out = sdpa(*inputs, **options)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    return [*(g.detach() for g in first), *second]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", ["ulysses", "ring of 3", "both", "dp tp ring"])
def test_as_on_one_device(mesh: str, case: str) -> None:
    on, where = MESHES[mesh]
    options, plain = dict(CASES[case]), draw(2 if case == "grouped" else 4)
    ours_options = dict(options)
    mask = options.get("attn_mask")
    leaves = [t.requires_grad_() for t in plain]
    ours = [dtorch.distribute_tensor(t.detach(), on, where).requires_grad_() for t in plain]
    mine, theirs = list(ours), list(leaves)
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.clone().requires_grad_()
        ours_options["attn_mask"] = dtorch.distribute_tensor(mask, on, [Replicate()] * on.ndim).requires_grad_()
        mine, theirs = [*mine, ours_options["attn_mask"]], [*theirs, options["attn_mask"]]
    for x, y in zip(twice(mine, ours, ours_options), twice(theirs, leaves, options), strict=True):
        torch.testing.assert_close(x.to_torch(), y)


def test_of_a_plain_mask() -> None:
    on, where = MESHES["ring"]
    plain, mask = [t.requires_grad_() for t in draw()], CASES["float mask"]["attn_mask"]
    ours = [dtorch.distribute_tensor(t.detach(), on, where).requires_grad_() for t in plain]
    masks = [mask.clone().requires_grad_() for _ in range(2)]
    found = twice([*ours, masks[0]], ours, {"attn_mask": masks[0]})
    for a, b in zip(found, twice([*plain, masks[1]], plain, {"attn_mask": masks[1]}), strict=True):
        torch.testing.assert_close(a.to_torch() if type(a) is dtorch.Tensor else a, b)


def test_of_one_tensor() -> None:
    on, where = MESHES["ring"]
    x = draw()[0].requires_grad_()
    ours = dtorch.distribute_tensor(x.detach(), on, where).requires_grad_()
    for a, b in zip(twice([ours], [ours] * 3, {}), twice([x], [x] * 3, {}), strict=True):
        torch.testing.assert_close(a.to_torch(), b)


@pytest.mark.parametrize("random", ["counter", "torch"])
def test_the_same_scores_are_dropped(random: str) -> None:
    """Whether the graph of the first gradient is kept or not."""
    dtorch.shutdown()
    dtorch.init(engine="simulate", random=random)
    ours = [dtorch.distribute_tensor(t, *MESHES["ring"]).requires_grad_() for t in draw()]
    found = []
    for create_graph in (False, True):
        torch.manual_seed(1)
        out = sdpa(*ours, dropout_p=0.4)
        found.append(torch.autograd.grad(out.square().sum(), ours, create_graph=create_graph))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a.to_torch(), b.detach().to_torch())
    dtorch.shutdown()
    dtorch.init(engine="simulate")
