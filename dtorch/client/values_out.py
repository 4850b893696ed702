"""Values on their way out of the workers: reads, copies, pickles."""

from __future__ import annotations

from typing import Any

import torch

from ..future import TensorFuture
from ..mesh import DeviceMesh
from ..placement import boxed, decode, encode, settled
from ..tensor import Tensor
from . import aliasing, host, redistribute, runtime, torch_internals, watch


def fetch(tensor: Tensor) -> TensorFuture:
    """A future of the whole tensor as a plain one."""
    if tensor._spec is None and tensor._host.root.joined is not None:
        host.commit(tensor, tensor._host.root.joined._spec.mesh)
    if tensor._spec is None:
        future = TensorFuture()
        plain, recorder = tensor._host.plain.detach(), watch.recorder()
        future._set(plain.clone() if recorder is None else recorder.plain_op(torch.clone, (plain,), {}))
        return future
    spec = tensor._spec
    tensor = readable(tensor)
    controller = runtime.controller()
    with controller.lock:
        aliasing.refresh(controller, tensor._value)
        future = controller.get(tensor._value, tensor._spec)
    controller.carried(spec.nbytes)
    return future


def readable(tensor: Tensor) -> Tensor:
    """A placed tensor as it can be read: without pending sums and packed dims."""
    # Past torch's dispatcher: the first op of a subclass that it sees makes it import torch.distributed.tensor (2.13), half a second.
    spec = tensor._spec
    if spec.has_partial or spec.has_packed:
        return redistribute.move(tensor, spec.with_placements(boxed(spec.placements)), "read")
    return tensor


def plain_data(data: Any) -> Any:
    """Nested lists with plain tensors in place of dtorch ones; waits once for them all."""
    return _answers(_asked(data))


def _asked(data: Any) -> Any:
    if isinstance(data, Tensor):
        return data.to_torch_async()
    return [_asked(item) for item in data] if isinstance(data, (list, tuple)) else data


def _answers(data: Any) -> Any:
    if isinstance(data, TensorFuture):
        return data.get()
    return [_answers(item) for item in data] if isinstance(data, list) else data


def local_shards(tensor: Tensor) -> dict[torch.device, torch.Tensor]:
    """What each device holds."""
    if tensor._spec is None:
        host.commit(tensor, tensor.device_mesh)
    controller = runtime.controller()
    with controller.lock:
        aliasing.refresh(controller, tensor._value)
    shards = controller.shards(tensor._value, tensor._spec)
    return {torch.device(tensor._spec.mesh.device_type, i): t for i, t in shards.items()}


def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy on the workers, with its gradient and Python attributes; as for ``torch.Tensor``, leaves only."""
    from copy import deepcopy as copy_of

    found = memo.get(id(tensor))
    if found is not None:
        return found
    if not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # raises, in torch's own words
    with torch.no_grad():
        copied = tensor.detach().clone()
    if tensor.requires_grad:
        copied.requires_grad_(True)
    memo[id(tensor)] = copied
    if getattr(tensor, "_is_param", False):  # as nn.Parameter: neither its gradient nor the user's attributes
        copied._is_param = True  # type: ignore[attr-defined]
        return copied
    if tensor.grad is not None:
        copied.grad = copy_of(tensor.grad, memo)
    copied.__dict__.update({k: copy_of(v, memo) for k, v in attributes(tensor).items()})
    return copied


def attributes(tensor: Tensor) -> dict[str, Any]:
    """The Python attributes that are the user's or torch's (``_is_param``), not ours."""
    return {name: value for name, value in tensor.__dict__.items() if name not in ("_spec", "_value", "_host", "_leaf")}


def reduce(tensor: Tensor) -> Any:
    """Pickle: the whole values, the mesh and the placements; pending sums are completed."""
    if torch_internals.is_in_legacy_save():
        raise RuntimeError(
            "torch.save(..., _use_new_zipfile_serialization=False): that format brings values only after the tensors were made of them, so "
            "dtorch tensors would be of uninitialised memory; leave the argument out, or save x.to_torch()"
        )
    placements = settled(tensor.placements)
    mesh = tensor.device_mesh
    where = None
    if tensor._spec is not None:
        names = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
        where = (mesh.device_type, mesh.mesh.tolist(), names, encode(placements))
    plain = tensor.detach().to_torch()
    if (
        not tensor.is_contiguous() and torch.empty_like(tensor).stride() == tensor.stride()
    ):  # dense in another order of dims
        plain = torch.empty_strided(plain.shape, tensor.stride(), dtype=plain.dtype, device="cpu").copy_(plain)
    return rebuild, (plain, where, tensor.requires_grad, attributes(tensor))


def rebuild(plain: torch.Tensor, where: Any, requires_grad: bool, named: dict[str, Any]) -> Tensor:
    """The tensor that `reduce` described, on the mesh it was on."""
    if where is None:
        tensor = host.make(plain)
    else:
        kind, grid, names, placements = where
        tensor = host.from_plain(plain, DeviceMesh(kind, grid, names), decode(placements))
    if requires_grad:
        tensor.requires_grad_(True)
    tensor.__dict__.update(named)
    return tensor


torch.serialization.add_safe_globals([rebuild])
