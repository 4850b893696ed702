"""A linear layer of sequences moves nothing, however batch and sequence are split, and is torch's: values and gradients of any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard
from dtorch.client.linear import linear

pytestmark = pytest.mark.usefixtures("simulated")

MESH = dtorch.init_device_mesh("cpu", (2, 3, 2), ("dp", "cp", "tp"))
BATCH, SEQUENCE, LAST, WHOLE = Shard(0), Shard(1), Shard(2), Replicate()

#: Of the input, the weight and the bias.
PLACES = {
    "batch and sequence": ([BATCH, SEQUENCE, WHOLE], [WHOLE] * 3, [WHOLE] * 3),
    "sequence twice": ([SEQUENCE, SEQUENCE, WHOLE], [WHOLE] * 3, [WHOLE] * 3),
    "by columns": ([BATCH, SEQUENCE, WHOLE], [WHOLE, WHOLE, Shard(0)], [WHOLE, WHOLE, Shard(0)]),
    "by rows": ([BATCH, SEQUENCE, LAST], [WHOLE, WHOLE, Shard(1)], [WHOLE] * 3),
    "all apart": ([SEQUENCE, BATCH, LAST], [Shard(0), Shard(0), Shard(1)], [WHOLE, WHOLE, Shard(0)]),
}


def tensors(bias: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 7, 6), (5, 6), (5,)][: 3 if bias else 2]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def place(plain: list[torch.Tensor], where: Any) -> list[torch.Tensor]:
    return [dtorch.distribute_tensor(t, MESH, p).requires_grad_() for t, p in zip(plain, where, strict=False)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("case", PLACES)
def test_as_on_one_device(case: str, bias: bool) -> None:
    """And twice: gradients of gradients, as a penalty on gradients needs them."""
    plain = [t.requires_grad_() for t in tensors(bias)]
    placed = place([t.detach() for t in plain], PLACES[case])
    found = []
    for ts, call in ((plain, torch.nn.functional.linear), (placed, linear)):
        out = call(*ts)
        grads = torch.autograd.grad(out.square().sum(), ts, create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in grads), ts)
        found.append([out, *grads, *again])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours.detach().to_torch(), theirs.detach())


def test_nothing_moves_but_the_sum_of_the_weights_gradient() -> None:
    x, weight = place(tensors(False), PLACES["batch and sequence"])
    with dtorch.record() as r:
        out = linear(x, weight)
        out.backward(torch.ones_like(out))
    assert out.placements == [BATCH, SEQUENCE, WHOLE]
    assert [(one.kind, one.op) for one in r.communication] == [("all_reduce", "gradient")]
    x, weight = place(tensors(False), PLACES["by columns"])
    with dtorch.record() as r:
        out = linear(x, weight)
    assert (out.placements, r.communication) == ([BATCH, SEQUENCE, LAST], [])


def test_other_calls_are_torchs() -> None:
    x, weight, _ = tensors(True)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    placed = dtorch.distribute_tensor(x, MESH, [BATCH, SEQUENCE, WHOLE])
    torch.testing.assert_close(
        linear(placed, weight).to_torch(), torch.nn.functional.linear(x, weight)
    )  # a plain weight
    with torch.inference_mode():
        torch.testing.assert_close(
            linear(placed, dtorch.distribute_tensor(weight, MESH)).to_torch(), torch.nn.functional.linear(x, weight)
        )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(placed, dtorch.distribute_tensor(weight.t().contiguous(), MESH))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    found = []
    for ts in (
        [t.to(dtype).requires_grad_() for t in tensors(True)],
        place([t.to(dtype) for t in tensors(True)], PLACES["by columns"]),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(*ts)
        out.sum().backward()
        found.append([out.detach(), *(t.grad for t in ts)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.to_torch(), theirs, rtol=2e-2, atol=2e-2)
