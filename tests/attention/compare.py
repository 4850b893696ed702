"""Attention on a mesh beside the same attention in plain torch on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import dtorch
from dtorch import DeviceMesh, Placement, Replicate, Shard

BATCH, HEADS, SEQUENCE = Shard(0), Shard(1), Shard(2)

#: What each axis does, and the placements of q, k and v on it.
MESHES: dict[str, tuple[DeviceMesh, list[Placement]]] = {
    "ulysses": (dtorch.init_device_mesh("cpu", 4, ("ulysses_cp",)), [SEQUENCE]),
    "ring": (dtorch.init_device_mesh("cpu", 4, ("ring_cp",)), [SEQUENCE]),
    "ring of 3": (dtorch.init_device_mesh("cpu", 3, ("ring_cp",)), [SEQUENCE]),
    "both": (dtorch.init_device_mesh("cpu", (2, 2), ("ulysses_cp", "ring_cp")), [SEQUENCE] * 2),
    "ring first": (dtorch.init_device_mesh("cpu", (3, 2), ("ring_cp", "ulysess_cp")), [SEQUENCE] * 2),
    "no names": (dtorch.init_device_mesh("cpu", (2, 3)), [SEQUENCE] * 2),
    "dp tp ring": (dtorch.init_device_mesh("cpu", (2, 2, 2), ("dp", "tp", "ring_cp")), [BATCH, HEADS, SEQUENCE]),
    "ulysses dp tp": (dtorch.init_device_mesh("cpu", (2, 2, 2), ("ulysses_cp", "dp", "tp")), [SEQUENCE, BATCH, HEADS]),
    "all": (
        dtorch.init_device_mesh("cpu", (2, 2, 2, 2), ("dp", "ulysses_cp", "ring_cp", "tp")),
        [BATCH, SEQUENCE, SEQUENCE, HEADS],
    ),
    "idle axes": (
        dtorch.init_device_mesh("cpu", (2, 3, 2), ("dp", "ring_cp", "tp")),
        [Replicate(), SEQUENCE, Replicate()],
    ),
}


def compare(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    queries: int = 16,
    keys: int | None = None,
    features: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float32,
    mask: torch.Tensor | None = None,
    mask_placements: Sequence[Placement] | None = None,
    key_placements: Sequence[Placement] | None = None,
    **options: Any,
) -> None:
    """Output and every gradient, of a float mask too, are those of plain torch, and lie as their tensors do.

    bfloat16 is compared with plain torch in bfloat16, at the accuracy that is promised for it.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    kv_heads, keys = kv_heads or heads, keys or queries
    q, k, v = (
        draw(batch, heads, queries, features[0]),
        draw(batch, kv_heads, keys, features[0]),
        draw(batch, kv_heads, keys, features[1]),
    )
    grad = draw(batch, heads, queries, features[1])
    if kv_heads != heads:
        options["enable_gqa"] = True
    places = [placements, key_placements or placements, key_placements or placements]
    inputs, places = [q, k, v], list(places)
    if mask is not None:
        inputs.append(mask.to(dtype) if mask.is_floating_point() else mask)
        places.append(mask_placements or [Replicate()] * mesh.ndim)

    def run(place: Any) -> list[torch.Tensor]:
        leaves = [
            place(t.clone(), p).requires_grad_(t.is_floating_point()) for t, p in zip(inputs, places, strict=True)
        ]
        attn_mask = leaves[3] if mask is not None else None
        torch.manual_seed(5)
        out = scaled_dot_product_attention(*leaves[:3], attn_mask=attn_mask, **options)
        out.backward(place(grad, placements))
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.requires_grad)]

    expected = run(lambda t, p: t)
    actual = run(lambda t, p: dtorch.distribute_tensor(t, mesh, p))
    assert len(expected) == len(actual)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for name, x, y, where in zip(("out", "q", "k", "v", "mask"), actual, expected, [placements, *places], strict=False):
        assert x.dtype == y.dtype
        assert name != "out" or [n for n, size in zip(x.stride(), x.shape, strict=True) if size > 1] == [
            n for n, size in zip(y.stride(), y.shape, strict=True) if size > 1
        ]
        assert x.placements == [Replicate() if name == "out" and p == Shard(3) else p for p in where], name
        torch.testing.assert_close(
            x.to_torch(), y, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
