"""The checks of one OptimizerInfo: three steps, single-tensor, foreach and fused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from .adapters import Adapter
from .checks import Body, Check, Grid, Place, compare
from .outcome import Outcome
from .samples import seed

STEPS = 3
SHAPES = ((6, 5), (5, 4), (7,), (3, 2, 4))
VARIANTS = ("replicate", "first", "last", "mixed")
ROUGH = {
    torch.optim.LBFGS: (1e-3, 1e-3),  # stops when a change is small enough: the last bit of a sum decides when
    torch.optim.Muon: (2e-2, 2e-2),  # orthogonalises in bfloat16
}


def database() -> list[Any]:
    """PyTorch's OptimizerInfos, but for the one that wants sparse gradients."""
    from torch.testing._internal.common_optimizers import optim_db

    return [info for info in optim_db if not info.only_supports_sparse_grads]


def name(info: Any) -> str:
    return f"optim.{info.optim_cls.__name__}"


def run(info: Any, adapter: Adapter, grid: Grid) -> Iterator[Outcome]:
    """Every outcome of an optimizer over ``grid``: each of its configurations is a sample, each implementation a check."""
    if "backward" not in grid.checks:
        return
    narrowed = Grid(grid.meshes, tuple(v for v in grid.variants if v in VARIANTS), grid.checks, grid.sample_limit)
    for number, given in enumerate(info.optim_inputs_func(device="cpu")):
        for kind, flags in _implementations(info):
            body, floor = _body(info, {**given.kwargs, **flags}), ROUGH.get(info.optim_cls, (0.0, 0.0))
            check = Check(name(info), kind, body, _parameters(info), "float32", number, floor=floor)
            yield from compare(check, adapter, narrowed)


def _implementations(info: Any) -> Iterator[tuple[str, dict[str, bool]]]:
    if "foreach" not in info.supported_impls:
        yield "default", {}
        return
    yield "single", {"foreach": False}
    yield "foreach", {"foreach": True}
    if "fused" in info.supported_impls:
        yield "fused", {"fused": True}


def _parameters(info: Any) -> list[torch.Tensor]:
    seed(name(info))
    shapes = [shape for shape in SHAPES if len(shape) == 2] if info.optim_cls is torch.optim.Muon else SHAPES
    return [torch.randn(shape) for shape in shapes]


def _body(info: Any, options: dict[str, Any]) -> Body:
    def call(place: Place) -> Any:
        parameters = [torch.nn.Parameter(place(tensor)) for tensor in _parameters(info)]
        optimizer = info.optim_cls(parameters, **copy.deepcopy(options))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(((p * p).sum() + p.sin().sum() for p in parameters), torch.zeros(()))
            loss.backward()
            return loss

        losses = [optimizer.step(closure).detach() for _ in range(STEPS)]
        state = None if info.step_requires_closure else optimizer.state_dict()["state"]
        return losses, [p.detach() for p in parameters], state

    return call
