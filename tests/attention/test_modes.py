"""Attention over a split sequence under what models do around it: dropout, modes of autograd, autocast, checkpoints, rotary embeddings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

from .compare import HEADS, MESHES, SEQUENCE, compare

sdpa = torch.nn.functional.scaled_dot_product_attention

RING = MESHES["ring of 3"][0]


@pytest.fixture
def torch_random(simulated: None) -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(engine="simulate", random="torch")
    yield
    dtorch.shutdown()
    dtorch.init(engine="simulate")


def place(*tensors: torch.Tensor, where: Any = (RING, [SEQUENCE])) -> list[dtorch.Tensor]:
    return [dtorch.distribute_tensor(t, *where) for t in tensors]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.usefixtures("simulated")
def test_dropout_drops_the_same_on_every_mesh(mode: Any, is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 12, 8) for _ in range(3))

    def run(where: tuple[DeviceMesh, list[Any]]) -> list[torch.Tensor]:
        torch.manual_seed(7)
        with mode():
            tensors = place(q, k, v, where=where)
            if mode is torch.enable_grad:
                tensors = [t.requires_grad_() for t in tensors]
            out = sdpa(*tensors, dropout_p=0.4, is_causal=is_causal)
            if not out.requires_grad:
                return [out.to_torch()]
            out.square().sum().backward()
            return [out.detach().to_torch(), *(t.grad.to_torch() for t in tensors)]

    expected = run((RING, [Replicate()]))
    for where in [(RING, [SEQUENCE]), (RING, [HEADS]), MESHES["both"], MESHES["ulysses"], MESHES["dp tp ring"]]:
        for x, y in zip(run(where), expected, strict=True):
            torch.testing.assert_close(x, y, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("simulated")
def test_dropout_of_everything() -> None:
    assert not sdpa(*place(*[torch.randn(1, 2, 6, 4)] * 3), dropout_p=1.0).to_torch().any()


@pytest.mark.parametrize("mesh", ["ring", "ulysses", "both", "dp tp ring"])
@pytest.mark.usefixtures("torch_random")
def test_dropout_as_plain_torch_draws_it(mesh: str) -> None:
    for options in ({}, {"is_causal": True}, {"mask": torch.randn(16, 16)}, {"heads": 4, "kv_heads": 2}):
        compare(*MESHES[mesh], dropout_p=0.3, **options)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mesh", ["ring", "ulysses", "both"])
@pytest.mark.usefixtures("simulated")
def test_without_gradients(mode: Any, mesh: str) -> None:
    q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    with mode():
        for options in ({}, {"is_causal": True}, {"attn_mask": torch.randn(16, 16)}, {"scale": 2.0}):
            out = sdpa(*place(q, k, v, where=MESHES[mesh]), **options)
            assert not out.requires_grad
            torch.testing.assert_close(out.to_torch(), sdpa(q, k, v, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("simulated")
def test_some_gradients() -> None:
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    for wanted in range(3):
        plain, placed = [q.clone(), k.clone(), v.clone()], place(q, k, v)
        for tensors in (plain, placed):
            tensors[wanted].requires_grad_()
            sdpa(*tensors, is_causal=True).square().sum().backward()
        torch.testing.assert_close(placed[wanted].grad.to_torch(), plain[wanted].grad, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("simulated")
def test_one_tensor_for_all_three_and_gradients_added_up() -> None:
    q = torch.randn(1, 2, 9, 4)
    plain, (placed,) = q.clone().requires_grad_(), place(q)
    placed.requires_grad_()
    for x in (plain, placed):
        for _ in range(2):
            sdpa(x, x, x, is_causal=True).square().sum().backward()
    torch.testing.assert_close(placed.grad.to_torch(), plain.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("simulated")
def test_autocast_and_checkpoint() -> None:
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    found = []
    for tensors in ([q.clone(), k.clone(), v.clone()], place(q, k, v)):
        leaves = [t.requires_grad_() for t in tensors]
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(sdpa, *leaves, use_reentrant=False)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        found.append([t.grad for t in leaves])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(y.to_torch(), x, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("simulated")
def test_a_checkpoint_drops_again_what_it_dropped() -> None:
    tensors = [t.requires_grad_() for t in place(*(torch.randn(1, 2, 9, 4) for _ in range(3)))]
    grads = []
    for call in (sdpa, lambda *args: checkpoint(lambda *a: sdpa(*a, dropout_p=0.5), *args[:3], use_reentrant=False)):
        torch.manual_seed(0)
        out = call(*tensors, dropout_p=0.5) if call is sdpa else call(*tensors)
        out.sum().backward()
        grads.append([t.grad.to_torch() for t in tensors])
        for t in tensors:
            t.grad = None
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("simulated")
def test_torch_func() -> None:
    q = torch.randn(1, 2, 9, 4)
    gradient = torch.func.grad(lambda x: sdpa(x, x, x, is_causal=True).square().sum())
    torch.testing.assert_close(gradient(*place(q)).to_torch(), gradient(q), atol=1e-5, rtol=1e-5)


class Attention(torch.nn.Module):
    """As models write it: positions from the sequence's length, rotary embeddings, heads split off, attention, heads put together."""

    def __init__(self, size: int = 16, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.features = heads, kv_heads, size // heads
        self.qkv = torch.nn.Linear(size, size + 2 * kv_heads * self.features)
        self.out = torch.nn.Linear(size, size)

    def rotary(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequencies = 100.0 ** (-torch.arange(half, device=x.device) / half)
        angles = positions[:, None, :, None] * frequencies
        first, second = x.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    def forward(self, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, size = x.shape
        if positions is None:
            positions = torch.arange(length, device=x.device).unsqueeze(0)
        widths = [size, self.kv_heads * self.features, self.kv_heads * self.features]
        q, k, v = (
            part.view(batch, length, -1, self.features).transpose(1, 2) for part in self.qkv(x).split(widths, -1)
        )
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        out = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).reshape(batch, length, size))


@pytest.mark.parametrize("mesh", ["ring", "ulysses", "both", "ring of 3", "no names"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.usefixtures("simulated")
def test_rotary_embeddings_and_positions_stay_right(mesh: str, given: bool, batch: int) -> None:
    """The model knows nothing of shards: positions are those of the whole sequence, made by it or handed to it (packed sequences)."""
    torch.manual_seed(0)
    module = Attention()
    x = torch.randn(batch, 13, 16)
    positions = torch.stack([torch.arange(13) % 7, torch.arange(13)])[:batch] if given else None
    where, placements = MESHES[mesh]
    along = [Shard(1)] * len(placements)
    ours = dtorch.nn.distribute_module(copy.deepcopy(module), where, {})
    a = x.clone().requires_grad_()
    b = dtorch.distribute_tensor(x, where, along).requires_grad_()
    split = None if positions is None else dtorch.distribute_tensor(positions, where, along)
    with dtorch.record() as r:
        expected, actual = module(a, positions), ours(b, split)
    if batch == 1:  # (a linear layer flattens batch and sequence, which keeps the split only of one of them)
        assert any(one.op == "scaled_dot_product_attention" for one in r.communication)
        assert actual.placements == along
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(actual.detach().to_torch(), expected.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(b.grad.to_torch(), a.grad, atol=1e-5, rtol=1e-4)
    for (name, p), q in zip(module.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(
            q.grad.to_torch(), p.grad, atol=1e-4, rtol=1e-4, msg=lambda t, name=name: f"{name}: {t}"
        )


@pytest.mark.usefixtures("simulated")
def test_plain_torch_is_as_it_was() -> None:
    """The op is overridden for plain tensors too, and hands them on to torch: same kernels, same graph, same values."""
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    out = sdpa(q, q, q)
    assert type(out.grad_fn).__name__ == "ScaledDotProductFlashAttentionForCpuBackward0"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert type(sdpa(q, q, q).grad_fn).__name__ != type(out.grad_fn).__name__
    with torch.inference_mode():
        torch.testing.assert_close(sdpa(q, q, q), out.detach())
    assert torch.func.vmap(lambda x: sdpa(x, x, x))(q.detach()).shape == q.shape
