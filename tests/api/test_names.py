"""Every public name is there, documented by examples that run; all else is torch's, so that ``import dtorch as torch`` ports a script."""

from __future__ import annotations

import inspect
import subprocess
import sys
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
    "profile",
    "set_implicit_communication",
    "Graph",
    "default_graph",
    "errors",
    "pipeline",
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
    assert {"matmul", "float32", "no_grad", "nn", "optim", "Size", "FloatTensor", "pi", "inf"} <= set(dir(dtorch))


def test_dir_has_no_implementation() -> None:
    assert not {"sys", "os", "inspect", "annotations", "client", "engine", "Callable", "TypeVar"} & set(dir(dtorch))
    assert not [name for name in dir(dtorch) if name.startswith("_") and not name.startswith("__")]


def test_compile_says_what_it_takes() -> None:
    with pytest.raises(TypeError, match=r"expected a function or a module, got int"):
        dtorch.compile(3)
    with pytest.raises(TypeError, match="mode"):
        dtorch.compile(mode="max-autotune")


def test_typed_constructors_make_tensors_of_ours(engine: str) -> None:
    for name, data in {
        "FloatTensor": [1.5, 2],
        "LongTensor": [[1, 2]],
        "BoolTensor": [True],
        "IntTensor": (2,),
    }.items():
        made, plain = getattr(dtorch, name)(data), getattr(torch, name)(data)
        assert type(made) is dtorch.Tensor
        assert (made.shape, made.dtype) == (plain.shape, plain.dtype)
        assert torch.equal(made.to_torch(), plain)
        assert isinstance(made, getattr(dtorch, name))
        assert not isinstance(made, dtorch.DoubleTensor)
    assert dtorch.FloatTensor(2, 3).shape == (2, 3)


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


SUBMODULES = """
import sys, dtorch, torch
before = torch.nn.utils.__spec__
from dtorch.nn.utils import clip_grad_norm_
from dtorch.nn.utils.rnn import pad_sequence
import dtorch.nn.init as init, dtorch.nn.functional as F, dtorch.nn.parameter
from dtorch.nn.modules.linear import Linear
assert clip_grad_norm_ is torch.nn.utils.clip_grad_norm_ and pad_sequence is torch.nn.utils.rnn.pad_sequence
assert init is torch.nn.init and F.gelu is torch.nn.functional.gelu and dtorch.nn.parameter is torch.nn.parameter
assert Linear is torch.nn.Linear and torch.nn.utils.__spec__ is before
from dtorch.optim import Adam
from dtorch.optim.lr_scheduler import StepLR
from dtorch.utils.data import DataLoader
from dtorch.utils.checkpoint import checkpoint
from dtorch.distributions import Normal
from dtorch.autograd.functional import jacobian
from dtorch.ops import aten
import dtorch.linalg, dtorch.cuda.amp, dtorch.amp, dtorch.fft, dtorch.special, dtorch.testing, dtorch.profiler, dtorch.backends.cuda
import dtorch.errors, dtorch.io, dtorch.client.runtime
assert Adam is torch.optim.Adam and StepLR is torch.optim.lr_scheduler.StepLR and DataLoader is torch.utils.data.DataLoader
assert checkpoint is torch.utils.checkpoint.checkpoint and Normal is torch.distributions.Normal and aten is torch.ops.aten
assert jacobian is torch.autograd.functional.jacobian and dtorch.cuda.amp is torch.cuda.amp and dtorch.optim is torch.optim
assert dtorch.io.__name__ == "dtorch.io" and dtorch.errors.__name__ == "dtorch.errors"
for name in ("dtorch.no_such_module", "dtorch.optim.no_such_module"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert name in str(error)
    else:
        raise SystemExit("imported")
try:
    import dtorch.nn.no_such_module
except ModuleNotFoundError as error:
    assert "dtorch.nn.no_such_module" in str(error)
else:
    raise SystemExit("imported")
"""


def test_submodules_are_the_same_modules() -> None:
    subprocess.run([sys.executable, "-c", SUBMODULES], check=True, timeout=120)


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
