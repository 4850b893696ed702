"""Ops that a user registers with ``torch.library`` run on the workers that import their module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import dtorch
from dtorch.errors import RemoteError

LIBRARY = """
import torch

@torch.library.custom_op("lifetime::scaled", mutates_args=())
def scaled(x: torch.Tensor, y: torch.Tensor, k: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x * y * k, x + y

@scaled.register_fake
def _(x, y, k):
    return torch.empty_like(x), torch.empty_like(x)

def _setup(ctx, inputs, output):
    x, y, ctx.k = inputs
    ctx.save_for_backward(x, y)

def _backward(ctx, g, h):
    x, y = ctx.saved_tensors
    return g * y * ctx.k + h, g * x * ctx.k + h, None

scaled.register_autograd(_backward, setup_context=_setup)

@torch.library.custom_op("lifetime::bump", mutates_args=("x",))
def bump(x: torch.Tensor, n: int) -> None:
    x.add_(n)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The user's module, importable here and on the workers."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "lifetime_ops.py").write_text(LIBRARY)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("lifetime_ops")
    sys.path.remove(str(folder))


@pytest.fixture
def imported(library: ModuleType) -> Iterator[dtorch.DeviceMesh]:
    """A mesh whose workers have imported it."""
    dtorch.shutdown()
    dtorch.init(engine="processes", worker_imports=["lifetime_ops"])
    yield dtorch.DeviceMesh("cpu", [0, 1])
    dtorch.shutdown()


def test_several_outputs_gradients_and_writes(imported: dtorch.DeviceMesh, library: ModuleType) -> None:
    plain = [torch.arange(6.0).reshape(3, 2).requires_grad_(True), torch.full((3, 2), 3.0).requires_grad_(True)]
    x, y = (dtorch.distribute_tensor(p.detach(), imported, [dtorch.Shard(0)]).requires_grad_(True) for p in plain)
    expected, results = library.scaled(*plain, 2.0), library.scaled(x, y, 2.0)
    for e, r in zip(expected, results, strict=True):
        assert torch.equal(r.to_torch(), e)
    (expected[0] * 2 + expected[1]).sum().backward()
    (results[0] * 2 + results[1]).sum().backward()
    for p, t in zip(plain, (x, y), strict=True):
        assert torch.equal(t.grad.to_torch(), p.grad)
    written = x.detach().clone()
    view = written[1:]
    library.bump(written, 5)
    assert torch.equal(view.to_torch(), plain[0].detach()[1:] + 5)


def test_without_the_import_the_error_says_what_to_do(mesh: dtorch.DeviceMesh, library: ModuleType) -> None:
    x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
    result, _ = library.scaled(x, x, 1.0)
    with pytest.raises(
        RemoteError, match=r"no op 'lifetime.scaled.default'(?s:.*)worker_imports(?s:.*)test_custom_ops.py"
    ):
        result.to_torch()
    assert x.sum().item() == 4
