"""Two transformer layers in plain torch: whole, on dtorch tensors, or as the shards of one process of two."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

F = nn.functional

LAYERS, DIM, HIDDEN, SEQUENCE, HEAD_DIM = 2, 512, 1536, 128, 64
COLUMN = ("q", "k", "v", "gate", "up")
ROW = ("o", "down")

#: What a hand-written program does where a block of split weights begins, and where it ends; dtorch needs neither.
Step = Callable[[torch.Tensor], torch.Tensor]


def nothing(x: torch.Tensor) -> torch.Tensor:
    return x


class Layer(nn.Module):
    """Llama's, without positions. ``(S, D)`` in and out."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(DIM, DIM, bias=False))
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)
        self.first, self.second = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.enter = self.leave = nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.enter(self.first(x))
        q, k, v = (part(h).view(SEQUENCE, -1, HEAD_DIM).transpose(0, 1)[None] for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.o(mixed[0].transpose(0, 1).reshape(SEQUENCE, -1)))
        h = self.enter(self.second(x))
        return x + self.leave(self.down(F.silu(self.gate(h)) * self.up(h)))


def whole() -> nn.Sequential:
    """The model, the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(LAYERS)])


def tokens() -> torch.Tensor:
    return torch.randn(SEQUENCE, DIM, generator=torch.Generator().manual_seed(1))


def shard(model: nn.Sequential, rank: int, size: int, enter: Step = nothing, leave: Step = nothing) -> nn.Sequential:
    """The model of process ``rank`` of ``size``; made of ``model``, which is no longer of use."""
    for layer in model:
        for names, dim in ((COLUMN, 0), (ROW, 1)):
            for name in names:
                part = getattr(layer, name)
                part.weight = nn.Parameter(part.weight.detach().chunk(size, dim)[rank].clone())
        layer.enter, layer.leave = enter, leave
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
