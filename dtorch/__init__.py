"""dtorch makes many devices feel like one: ordinary single-device PyTorch on tensors that live on many workers.

Whatever is not listed here is torch's: ``dtorch.matmul``, ``dtorch.float32``, ``dtorch.no_grad``, …
"""

from .engine import zygote as _zygote

_zygote.start()  # before torch is imported: the workers' parent imports it at the same time

from . import _submodules  # noqa: E402
from . import logs as _logs  # noqa: E402
from ._environment import check as _check  # noqa: E402

_logs.set_up()
_check()

import importlib as _importlib  # noqa: E402
from types import ModuleType as _Module  # noqa: E402
from typing import Any as _Any  # noqa: E402

import torch as _torch  # noqa: E402

_submodules.install()

from . import errors  # noqa: E402
from . import hints as _hints  # noqa: E402
from .client.defaults import default_mesh, manual_seed, no_sync  # noqa: E402
from .client.entry import redistribute  # noqa: E402
from .client.memory import memory_stats  # noqa: E402
from .client.runtime import devices, init, is_initialized, shutdown, synchronize  # noqa: E402
from .client.workers import WorkerStatus, worker_status  # noqa: E402
from .compiling import compile  # noqa: E402
from .creation import (  # noqa: E402
    arange,
    bartlett_window,
    blackman_window,
    empty,
    empty_like,
    empty_permuted,
    empty_strided,
    eye,
    full,
    full_like,
    hamming_window,
    hann_window,
    kaiser_window,
    linspace,
    logspace,
    ones,
    ones_like,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    randperm,
    scalar_tensor,
    tril_indices,
    triu_indices,
    zeros,
    zeros_like,
)
from .future import TensorFuture, as_completed  # noqa: E402
from .graph import Graph, default_graph  # noqa: E402
from .legacy import NAMES as _TYPED  # noqa: E402
from .legacy import typed as _typed  # noqa: E402
from .mesh import DeviceMesh, init_device_mesh  # noqa: E402
from .nn import distribute_module, summary  # noqa: E402
from .observe.implicit import set_implicit_communication  # noqa: E402
from .observe.profiling import profile  # noqa: E402
from .observe.recording import Recording, record  # noqa: E402
from .placement import Partial, Placement, Replicate, Shard  # noqa: E402
from .placing import as_tensor, distribute_tensor, from_numpy, from_torch, tensor  # noqa: E402
from .stages import assign_layers_to_stages  # noqa: E402
from .tensor import Tensor  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "DeviceMesh",
    "Graph",
    "Partial",
    "Placement",
    "Recording",
    "Replicate",
    "Shard",
    "Tensor",
    "TensorFuture",
    "WorkerStatus",
    "arange",
    "as_completed",
    "as_tensor",
    "assign_layers_to_stages",
    "bartlett_window",
    "blackman_window",
    "compile",
    "default_graph",
    "default_mesh",
    "devices",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "errors",
    "eye",
    "from_numpy",
    "from_torch",
    "full",
    "full_like",
    "hamming_window",
    "hann_window",
    "init",
    "init_device_mesh",
    "integrations",
    "io",
    "is_initialized",
    "kaiser_window",
    "linspace",
    "logspace",
    "manual_seed",
    "memory_stats",
    "no_sync",
    "ones",
    "ones_like",
    "pipeline",
    "profile",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "record",
    "redistribute",
    "scalar_tensor",
    "set_implicit_communication",
    "shutdown",
    "summary",
    "synchronize",
    "tensor",
    "tril_indices",
    "triu_indices",
    "worker_status",
    "zeros",
    "zeros_like",
]

globals().update({name: _typed(name) for name in _TYPED})


#: Imported when first asked for: most scripts, and the time to their first line of output, do without.
_ON_FIRST_USE = ("integrations", "io", "pipeline")


def __getattr__(name: str) -> _Any:
    """Whatever is not listed above is torch's: ``import dtorch as torch`` is a fair way to port a script."""
    if name in _ON_FIRST_USE:
        return _importlib.import_module(f"{__name__}.{name}")
    try:
        return getattr(_torch, name)
    except AttributeError:
        hint = _hints.near(name, __all__)
        raise AttributeError(f"module 'dtorch' has no attribute {name!r}, and neither has torch{hint}") from None


def __dir__() -> list[str]:
    def is_torchs(name: str) -> bool:
        value = vars(_torch).get(name)
        home = value.__name__ if isinstance(value, _Module) else getattr(value, "__module__", None) or "torch"
        return not name.startswith("_") and home.partition(".")[0] == "torch"

    dunder = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, *_TYPED, "nn", *dunder, *filter(is_torchs, dir(_torch))})
