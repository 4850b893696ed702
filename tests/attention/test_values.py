"""Attention over a split sequence is attention: the output and every gradient are those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

from .compare import MESHES, SEQUENCE, compare

pytestmark = pytest.mark.usefixtures("simulated")


def _mask(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _some_rows_hidden() -> torch.Tensor:
    mask = _mask(16, 16) > 0
    mask[3] = False  # a query that sees nothing
    mask[:, 5] = False  # a key that nobody sees
    return mask


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "uneven": {"queries": 13, "is_causal": True},
    "shorter than the mesh": {"queries": 3, "is_causal": True},
    "more queries": {"queries": 21, "keys": 9, "is_causal": True},
    "more keys": {"queries": 9, "keys": 23, "is_causal": True},
    "one query": {"queries": 1, "keys": 11},
    "other lengths": {"queries": 6, "keys": 17},
    "scale": {"scale": 0.3, "is_causal": True},
    "grouped": {"heads": 6, "kv_heads": 2, "is_causal": True},
    "one key head": {"kv_heads": 1},
    "heads that do not divide": {"heads": 5, "is_causal": True},
    "groups across devices": {"heads": 6, "kv_heads": 3, "is_causal": True},
    "fewer heads than devices": {"heads": 1},
    "features of v": {"features": (8, 5)},
    "bool mask": {"mask": _mask(16, 16) > 0},
    "rows hidden": {"mask": _some_rows_hidden()},
    "rows of -inf": {"mask": torch.where(_some_rows_hidden(), 0.0, -torch.inf)},
    "mask of keys": {"mask": _mask(2, 1, 1, 16)},
    "mask of heads": {"mask": _mask(4, 16, 16)},
    "mask of queries": {"mask": _mask(1, 1, 16, 1)},
    "mask, grouped": {"mask": _mask(2, 6, 16, 16), "heads": 6, "kv_heads": 3},
    "mask and uneven": {"mask": _mask(13, 9) > 0, "queries": 13, "keys": 9},
    "float64": {"dtype": torch.float64, "is_causal": True},
    "bfloat16": {"dtype": torch.bfloat16, "is_causal": True},
    "bfloat16 mask": {"dtype": torch.bfloat16, "mask": _mask(16, 16)},
    "bfloat16 grouped": {"dtype": torch.bfloat16, "heads": 8, "kv_heads": 2},
}


#: Every case on the first three; on the others those that differ in where things go.
EVERY_CASE = ("ulysses", "ring of 3", "both")
SOME_CASES = ("plain", "uneven", "grouped", "mask, grouped")


@pytest.mark.parametrize(
    ("case", "mesh"), [(case, mesh) for case in CASES for mesh in MESHES if mesh in EVERY_CASE or case in SOME_CASES]
)
def test_as_on_one_device(case: str, mesh: str) -> None:
    compare(*MESHES[mesh], **CASES[case])


def test_a_mask_may_itself_be_split() -> None:
    mesh, placements = MESHES["both"]
    for where in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Replicate()]):
        compare(mesh, placements, mask=_mask(16, 16), mask_placements=where)


def test_keys_and_values_may_lie_otherwise_than_queries() -> None:
    mesh, placements = MESHES["both"]
    for where in ([Replicate(), SEQUENCE], [SEQUENCE, Replicate()], [Shard(1), SEQUENCE], [Shard(3), Shard(0)]):
        compare(mesh, placements, key_placements=where, is_causal=True)
        compare(mesh, where, key_placements=placements, queries=5, keys=16)


def test_devices_that_have_nothing_to_wait_for_run_ahead() -> None:
    """With one key, one device of three has it all: some rearrange while others are in the ring."""
    compare(
        *MESHES["ring of 3"],
        key_placements=[Replicate()],
        heads=2,
        queries=20,
        keys=1,
        features=(4, 6),
        is_causal=True,
    )


def test_a_pending_sum_is_completed() -> None:
    mesh, _ = MESHES["ring of 3"]
    q = torch.randn(1, 2, 6, 4)
    x = dtorch.distribute_tensor(q, mesh, [SEQUENCE])
    pending = dtorch.distribute_tensor(q, mesh, [Replicate()]).redistribute(placements=[dtorch.Partial()])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(sdpa(x, pending, x).to_torch(), sdpa(q, q, q))
    torch.testing.assert_close(sdpa(pending, x, x, is_causal=True).to_torch(), sdpa(q, q, q, is_causal=True))


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_any_number_of_dims(lead: tuple[int, ...]) -> None:
    """3-d: no heads apart from the batch; 5-d: more than one dim before the heads."""
    mesh, _ = MESHES["both"]
    shape = (*lead, 4, 16, 8)
    dim = len(shape) - 2
    for mask in (None, torch.randn(16, 16), torch.randn(*shape[:-1], 16) > -1):
        plain = [torch.randn(shape).requires_grad_() for _ in range(3)]
        placed = [dtorch.distribute_tensor(t.detach(), mesh, [Shard(dim)] * 2).requires_grad_() for t in plain]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out, expected = sdpa(*placed, attn_mask=mask), sdpa(*plain, attn_mask=mask)
        assert out.placements == [Shard(dim)] * 2
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(out.detach().to_torch(), expected.detach(), atol=1e-5, rtol=1e-5)
        for x, y in zip(placed, plain, strict=True):
            torch.testing.assert_close(x.grad.to_torch(), y.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mesh", ["ring", "ulysses", "both"])
def test_a_causal_mask_beside_another(mesh: str) -> None:
    """torch's fused kernel takes both."""
    where, placements = MESHES[mesh]
    q = torch.randn(2, 4, 16, 8)
    mask = torch.randn(16, 16)
    x = dtorch.distribute_tensor(q, where, placements)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        sdpa(x, x, x, attn_mask=mask, is_causal=True).to_torch(), sdpa(q, q, q, attn_mask=mask, is_causal=True)
    )
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
        sdpa(x, x, x, attn_mask=mask, is_causal=True, dropout_p=0.5)
