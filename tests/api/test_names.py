"""Every public name is there, documented by examples that run; all else is torch's, so that ``import dtorch as torch`` ports a script."""

from __future__ import annotations

import doctest
import importlib
import inspect
import types

import pytest
import torch

import dtorch

#: The names of the public page that are dtorch's own.
NAMES = [
    "DeviceMesh",
    "init_device_mesh",
    "Shard",
    "Replicate",
    "Partial",
    "Placement",
    "assign_layers_to_stages",
    "distribute_module",
    "summary",
    "Tensor",
    "tensor",
    "as_tensor",
    "from_torch",
    "from_numpy",
    "distribute_tensor",
    "redistribute",
    "TensorFuture",
    "as_completed",
    "zeros",
    "ones",
    "full",
    "empty",
    "arange",
    "linspace",
    "logspace",
    "eye",
    "rand",
    "randn",
    "randint",
    "randperm",
    "tril_indices",
    "triu_indices",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "randint_like",
    "init",
    "shutdown",
    "synchronize",
    "manual_seed",
    "default_mesh",
    "is_initialized",
    "devices",
    "memory_stats",
    "no_sync",
    "record",
    "set_implicit_communication",
    "Graph",
    "default_graph",
    "errors",
]

METHODS = [
    "device_mesh",
    "placements",
    "is_dtensor",
    "check_placement",
    "redistribute",
    "redistribute_like",
    "redistribute_by_dict",
    "to_torch",
    "full_tensor",
    "numpy",
    "item",
    "tolist",
    "to_torch_async",
    "local_shards",
    "to",
    "cpu",
    "cuda",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "new_tensor",
]

#: Public modules whose docstrings' examples run below, in simulation.
MODULES = [
    "mesh",
    "placement",
    "tensor",
    "creation",
    "placing",
    "future",
    "graph",
    "stages",
    "errors",
    "client.runtime",
    "client.defaults",
    "client.memory",
    "client.entry",
    "observe.recording",
    "observe.implicit",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name(name: str) -> None:
    assert name in dtorch.__all__
    found = getattr(dtorch, name)
    assert inspect.getdoc(found)
    if not isinstance(found, types.ModuleType):
        assert found is not getattr(torch, name, None)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_tensor(name: str) -> None:
    assert inspect.getdoc(getattr(dtorch.Tensor, name)) or getattr(torch.Tensor, name)


def test_everything_listed_is_there() -> None:
    assert [name for name in dtorch.__all__ if not hasattr(dtorch, name)] == []
    assert set(dtorch.__all__) <= set(dir(dtorch))
    assert {"matmul", "float32", "no_grad", "nn"} <= set(dir(dtorch))


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings(module: str, simulated: None) -> None:
    found = importlib.import_module(f"dtorch.{module}")
    names = {
        **vars(torch),
        **{name: getattr(dtorch, name) for name in dtorch.__all__},
        "torch": torch,
        "dtorch": dtorch,
    }
    dtorch.shutdown()
    dtorch.init(engine="simulate")
    tried = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(found, globs=names):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not result.failed, "".join(report)
        tried += result.attempted
    assert tried or module in ("errors",)


def test_errors() -> None:
    errors = dtorch.errors
    for kind in (
        errors.WorkerLost,
        errors.RemoteError,
        errors.MeshMismatch,
        errors.DeviceUnavailable,
        errors.ImplicitCommunication,
    ):
        assert issubclass(kind, errors.DTorchError)


PORTED = """
import dtorch as torch
from dtorch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(16, 4)
y = x.sum(dim=1, keepdim=True)
losses = []
for _ in range(5):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
with torch.no_grad():
    accuracy = torch.where(model(x).sub(y).abs() < 1, torch.ones(16, 1), torch.zeros(16, 1)).mean()
half = torch.tensor([1, 2], dtype=torch.float16).to(torch.float32)
assert isinstance(x, torch.Tensor) and x.shape == torch.Size([16, 4]) and x.dtype is torch.float32
"""


@pytest.mark.usefixtures("engine")
def test_import_dtorch_as_torch() -> None:
    ported: dict = {}
    exec(PORTED, ported)
    plain: dict = {}
    exec(PORTED.replace("import dtorch as torch\nfrom dtorch import nn", "import torch\nfrom torch import nn"), plain)
    assert ported["losses"] == pytest.approx(plain["losses"])
    assert ported["accuracy"].item() == plain["accuracy"].item()
    assert isinstance(ported["x"], dtorch.Tensor)
    assert not isinstance(plain["x"], dtorch.Tensor)
