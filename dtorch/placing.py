"""Tensors out of data and out of plain tensors, and where a call says they go."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from . import hints
from .client import host, runtime, torch_internals
from .mesh import DeviceMesh
from .placement import REPLICATE, Placement, PlacementList, normalize
from .tensor import Tensor

Where = tuple[DeviceMesh, PlacementList]


def where_to(name: str, ndim: int, device: Any, device_mesh: Any, placements: Any) -> Where | None:
    """The mesh and normalised placements a call asks for; None: uncommitted."""
    if device is not None and device_mesh is not None:
        raise ValueError(f"{name}(): device= and device_mesh= cannot be given together; a mesh names its devices")
    if device is not None and placements is not None:
        raise ValueError(
            f"{name}(): device= and placements= cannot be given together; give device_mesh= and placements="
        )
    if device is not None:
        kind, index = device_named(name, device)
        if kind == "cuda":
            return DeviceMesh(f"cuda:{index or 0}"), PlacementList((REPLICATE,))
    if device_mesh is None:
        if placements is None:
            chosen = runtime.chosen_mesh()
            return None if chosen is None else (chosen, PlacementList((REPLICATE,) * chosen.ndim))
        device_mesh = runtime.get_default_mesh()
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"{name}(): argument 'device_mesh' must be a DeviceMesh, not {type(device_mesh).__name__}")
    if placements is None:
        return device_mesh, PlacementList((REPLICATE,) * device_mesh.ndim)
    return device_mesh, normalize(placements, device_mesh.ndim, ndim)


def device_named(name: str, device: Any) -> tuple[str, int | None]:
    """The type and index of ``device``, which must be one that a dtorch tensor can be on: cpu, cuda or dtorch itself."""
    if isinstance(device, int) and not isinstance(device, bool):  # to torch a bare number is an accelerator's
        return "cuda", device
    found = torch.device(device)
    if found.type not in ("cpu", "cuda", torch_internals.BACKEND):
        raise ValueError(f"{name}(): device must be a cpu, cuda or dtorch device, got {str(device)!r}")
    return found.type, found.index


def place(plain: torch.Tensor, where: Where | None, requires_grad: bool) -> Tensor:
    """A plain tensor as a new dtorch tensor, there."""
    host.check_dense(plain)
    plain = _constant(plain)
    with torch_internals.without_func():
        tensor = host.make(plain) if where is None else host.from_plain(plain, *where)
    return tensor.requires_grad_(True) if requires_grad else tensor


def _constant(plain: torch.Tensor) -> torch.Tensor:
    """``plain`` outside of ``torch.func``, or an error where a derivative or a dim of it would be lost."""
    found = torch_internals.constant(plain)
    if found is None:
        raise TypeError(
            "dtorch: a plain tensor that torch.func maps or differentiates, or with a tangent, cannot be placed; place it before, "
            "outside of the function"
        )
    return found


class _Placed(torch.autograd.Function):
    """`place` of what a plain graph made. Its backward waits for the gradient's values."""

    @staticmethod
    def forward(ctx: Any, plain: torch.Tensor, where: Where | None) -> Tensor:
        return place(plain.detach().clone() if where is None else plain.detach(), where, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[torch.Tensor, None]:
        return grad.to_torch(), None


@hints.takes
def from_torch(
    data: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """A dtorch tensor with the values of a plain one, copied: a leaf with its ``requires_grad``, or, with grad mode on, part of its graph.

    Args:
        data: a dense plain tensor.
        device_mesh: where to; uncommitted without mesh and placements.
        placements: one per mesh axis; replicated if only a mesh is given. Under ``Partial()`` the first device holds the values.

    Raises:
        TypeError, ValueError: not a tensor; sparse, nested, quantised or on the meta device; placements that do not fit; what
            ``torch.func`` maps or differentiates.

    Example::

        >>> from_torch(torch.arange(4), DeviceMesh("cpu", [0, 1]), [Shard(0)]).local_shards()[torch.device("cpu", 1)]
        tensor([2, 3])
    """
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"from_torch(): argument 'data' must be a torch.Tensor, not {type(data).__name__}")
    if isinstance(data, Tensor):
        return data if device_mesh is None and placements is None else data.redistribute(device_mesh, placements)
    host.check_dense(data)
    data = _constant(data)
    where = where_to("from_torch", data.ndim, None, device_mesh, placements)
    if data.grad_fn is not None and torch.is_grad_enabled():
        return _Placed.apply(data, where)
    if where is None:
        return place(data.detach().clone(), None, data.requires_grad)
    return place(data, where, data.requires_grad)


@hints.takes
def distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """`from_torch` under the name that ``torch.distributed.tensor`` uses; on the default mesh if none is given.

    Args:
        tensor: a dense plain tensor, or a dtorch tensor, which is redistributed.
        device_mesh: where to; the default mesh if left out.
        placements: one per mesh axis; replicated if left out.

    Raises:
        TypeError, ValueError: as `from_torch`.

    Example::

        >>> distribute_tensor(torch.ones(4, 2), DeviceMesh("cpu", [0, 1]), [Shard(1)]).placements
        [Shard(dim=1)]
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor(): argument 'tensor' must be a torch.Tensor, not {type(tensor).__name__}")
    mesh = runtime.get_default_mesh() if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"distribute_tensor(): argument 'device_mesh' must be a DeviceMesh, not {type(mesh).__name__}")
    return from_torch(tensor, mesh, placements)


@hints.takes
def from_numpy(
    array: Any, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """A dtorch tensor with the values and dtype of a numpy array, copied (``torch.from_numpy`` shares its memory).

    Args:
        array: of any numeric dtype that torch has.
        device_mesh, placements: where to, as for `from_torch`.

    Raises:
        TypeError: not an array, or of a dtype that torch lacks.

    Example::

        >>> import numpy
        >>> from_numpy(numpy.zeros((4, 2)), DeviceMesh("cpu", [0, 1]), [Shard(0)]).dtype
        torch.float64
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody will write: it is copied
        plain = torch.from_numpy(array)
    return from_torch(plain, device_mesh, placements)


@hints.takes
def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """``torch.tensor``, placed: a copy of ``data``, of its dtype unless told otherwise.

    Args:
        data: numbers, nested lists of them (0-d tensors too), an array or a tensor.
        device_mesh, placements: where to; uncommitted with neither. A dtorch tensor's copy stays where that is.

    Raises:
        TypeError, ValueError, RuntimeError: torch's own for ``data``; placements that do not fit.

    Example::

        >>> tensor([[1, 2], [3, 4]], device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)]).sum().item()
        10
    """
    if isinstance(data, Tensor):
        where = where_told("tensor", data.ndim, device, device_mesh, placements, data)
        found = data.detach().clone()
        if dtype is not None:
            found = found.to(dtype)
        return moved(found, where).requires_grad_(requires_grad)
    if isinstance(data, torch.Tensor):
        host.check_dense(data)
        plain = data.detach().clone()
    else:
        plain = torch.tensor(data, dtype=dtype, device="cpu")
    if dtype is not None:
        plain = plain.to(dtype)
    return place(plain, where_to("tensor", plain.ndim, device, device_mesh, placements), requires_grad)


@hints.takes
def as_tensor(
    data: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """``torch.as_tensor``, placed: a dtorch tensor that is of that dtype and there already is returned itself, all else is copied.

    Example::

        >>> x = as_tensor([1.0, 2.0])
        >>> as_tensor(x) is x
        True
    """
    if isinstance(data, Tensor):
        found = moved(data, where_told("as_tensor", data.ndim, device, device_mesh, placements, data))
        return found if dtype is None else found.to(dtype)
    return tensor(data, dtype=dtype, device=device, device_mesh=device_mesh, placements=placements)


def where_told(name: str, ndim: int, device: Any, device_mesh: Any, placements: Any, source: Tensor) -> Where | None:
    """Where a call puts something made of ``source``; None: where that is."""
    if device is None and device_mesh is None:
        return (
            None if placements is None else (source.device_mesh, normalize(placements, source.device_mesh.ndim, ndim))
        )
    where = where_to(name, ndim, device, device_mesh, placements)
    return None if device is not None and (where is None or where[0].device_type == "cpu") else where


def moved(x: Tensor, where: Where | None) -> Tensor:
    """``x`` there; None: itself."""
    return x if where is None else x.redistribute(*where)
