"""Llama, as for one device: RMSNorm, rotary positions, grouped-query attention, SwiGLU (arXiv 2302.13971, 2307.09288).

No block knows where it runs. `Llama` makes each under the mesh of its pipeline stage, and there the layers with a parallel name are split
over the axis ``tp``, if there is one. How the batch and the sequence are split is decided by whoever makes the ids.
Without a mesh all of it is plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

import dtorch
from dtorch import nn
from dtorch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """The sizes of a model; the defaults make one that runs in seconds."""

    vocabulary: int = 64
    width: int = 32
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    rope_base: float = 10000.0

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) of x: (batch, heads, length, head width)."""
    length, width = x.shape[-2:]
    frequency = base ** (-torch.arange(0, width, 2, device=x.device) / width)
    angle = torch.outer(torch.arange(length, device=x.device), frequency)
    real, imaginary = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([real * cos - imaginary * sin, imaginary * cos + real * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_width
        self.query = nn.ColumnParallelLinear(config.width, config.width, bias=False)
        self.key = nn.ColumnParallelLinear(config.width, kv_width, bias=False)
        self.value = nn.ColumnParallelLinear(config.width, kv_width, bias=False)
        self.out = nn.RowParallelLinearWithReplicateOutput(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = rotate(query, self.config.rope_base), rotate(key, self.config.rope_base)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.ColumnParallelLinear(config.width, config.hidden, bias=False)
        self.up = nn.ColumnParallelLinear(config.width, config.hidden, bias=False)
        self.down = nn.RowParallelLinearWithReplicateOutput(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """ids (batch, length) → logits (batch, length, vocabulary)."""

    def __init__(self, config: Config, mesh: dtorch.DeviceMesh | None = None) -> None:
        super().__init__()
        self.config = config
        meshes = [None] if mesh is None else mesh.unbind("pp")
        stage_of = dtorch.assign_layers_to_stages(config.layers, len(meshes))

        def made(stage: int, make: Callable[[], nn.Module]) -> nn.Module:
            mesh = meshes[stage]
            with nullcontext() if mesh is None else dtorch.default_mesh(mesh):
                return make()

        self.embedding = made(0, lambda: nn.EmbeddingWithReplicateOutput(config.vocabulary, config.width))
        self.blocks = nn.ModuleList([made(stage, lambda: Block(config)) for stage in stage_of])
        self.norm = made(-1, lambda: nn.RMSNorm(config.width, eps=1e-5))
        self.head = made(-1, lambda: nn.ColumnParallelLinear(config.width, config.vocabulary, bias=False))

        parts = [
            [block for block, at in zip(self.blocks, stage_of, strict=True) if at == s] for s in range(len(meshes))
        ]
        parts[0].insert(0, self.embedding)
        parts[-1] += [self.norm, self.head]
        #: The same layers once more, one module per pipeline stage. (A tuple: their parameters keep one name each.)
        self.stages = tuple(nn.Sequential(*part) for part in parts)

    def forward(self, ids: Tensor) -> Tensor:
        x = ids
        for stage in self.stages:
            x = stage(dtorch.pipeline.to_stage(x, stage))
        return x
