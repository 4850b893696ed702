"""A layer that takes a given time without a core: it sleeps on the worker. For benchmarks of who waits for whom."""

from __future__ import annotations

import time
from typing import Any

import torch

FORWARD, BACKWARD = 0.02, 0.04


@torch.library.custom_op("benchmarks::nap", mutates_args=())
def nap(x: torch.Tensor, seconds: float) -> torch.Tensor:
    time.sleep(seconds)
    return x.clone()


@nap.register_fake
def _(x: torch.Tensor, seconds: float) -> torch.Tensor:
    return torch.empty_like(x)


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return nap(x, FORWARD)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return nap(grad, BACKWARD)


class Nap(torch.nn.Module):
    """Passes on what it gets."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Nap.apply(x)
