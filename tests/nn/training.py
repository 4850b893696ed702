"""One training step of a module, and its comparison with the same step of the plain module in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

#: Every shape a model definition may meet: no axis, and subsets of the usual five, with tp of 1, 2 and 3.
MESHES: dict[str, DeviceMesh] = {
    "one device": DeviceMesh("cpu", [0]),
    "no names": DeviceMesh("cpu", [0, 1]),
    "dp": DeviceMesh("cpu", [0, 1], ("dp",)),
    "tp1": DeviceMesh("cpu", [0], ("tp",)),
    "tp2": DeviceMesh("cpu", [0, 1], ("tp",)),
    "tp3": DeviceMesh("cpu", [0, 1, 2], ("tp",)),
    "dp tp": DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp")),
    "tp dp": DeviceMesh("cpu", [[0, 1], [2, 3]], ("tp", "dp")),
    "pp tp": DeviceMesh("cpu", [[0, 1], [2, 3]], ("pp", "tp")),
    "ulysses": DeviceMesh("cpu", [0, 1], ("ulysses_cp",)),
    "ring tp": DeviceMesh("cpu", [[0, 1], [2, 3]], ("ring_cp", "tp")),
    "stage": DeviceMesh("cpu", [[0, 1], [2, 3]], ("pp", "tp")).unbind("pp")[1],
}

#: Where the batch and the sequence are split, by axis name; tp as the test says.
DATA = {"dp": Shard(0), "ulysses_cp": Shard(1), "ring_cp": Shard(1)}


def placed(plain: torch.Tensor, mesh: DeviceMesh, tp: Any = None) -> dtorch.Tensor:
    """A plain tensor (batch, sequence, …) on a mesh: split by the axes of data, and as ``tp`` says along that one."""
    names = mesh.mesh_dim_names or ()
    placements = [tp or Replicate() if name == "tp" else DATA.get(name, Replicate()) for name in names]
    return dtorch.distribute_tensor(plain.detach(), mesh, placements or [Replicate()])


def step(module: torch.nn.Module, *inputs: torch.Tensor, call: Callable[..., Any] | None = None) -> dict[str, Any]:
    """One forward, backward and AdamW step: the output, the gradients of inputs and parameters, the parameters after it."""
    for x in inputs:
        if x.is_floating_point():
            x.requires_grad_(True)
    # By default it divides by the root of a gradient's square, which makes of a rounding error near 0 a step of either sign.
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, eps=0.1)
    out = (call or module)(*inputs)
    weights = torch.arange(out.numel()).cos().reshape(out.shape)
    (out * weights).sum().backward()
    # A copy: the step changes the parameters in place, and a plain .grad may alias what it reads.
    found = {"out": out, **{f"input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}}
    found |= {f"grad {name}": None if p.grad is None else copy.copy(p.grad) for name, p in module.named_parameters()}
    optimizer.step()
    return {
        name: None if value is None else plain(value)
        for name, value in (found | {f"new {name}": p for name, p in module.named_parameters()}).items()
    }


def plain(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_torch() if isinstance(tensor, dtorch.Tensor) else tensor.clone()


def assert_same(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None
            continue
        torch.testing.assert_close(
            actual[name], value, rtol=1e-4, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
