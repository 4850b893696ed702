"""A function, run as it is on plain tensors and captured on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh, Placement, Replicate

MESH = DeviceMesh("cpu", [0, 1], ("x",))


def placed(tensor: torch.Tensor, *placements: Placement) -> Any:
    return dtorch.distribute_tensor(tensor, MESH, list(placements) or [Replicate()])


def runs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """What a call returns, and how many ops it asked the workers to run: 1 if it was captured."""
    with dtorch.record() as recording:
        result = function(*args, **kwargs)
    return result, len(recording.ops)


def captured(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a call that must be one message."""
    result, count = runs(function, *args, **kwargs)
    assert count == 1, f"{count} ops were issued"
    return result


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().to_torch(), expected.detach())
