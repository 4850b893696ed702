"""Tensors out of nothing, out of data, and out of plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .client import host, random_ops, runtime, torch_internals
from .mesh import DeviceMesh
from .placement import REPLICATE, Placement, PlacementList, is_partial, normalize
from .sharding.spec import Spec, intern_mesh
from .tensor import Tensor

aten = torch.ops.aten


def _where(
    name: str, ndim: int, device: Any, device_mesh: Any, placements: Any
) -> tuple[DeviceMesh, PlacementList] | None:
    """The mesh and normalised placements a call asks for; None: uncommitted."""
    if device is not None and device_mesh is not None:
        raise ValueError(f"{name}(): device= and device_mesh= cannot be given together; a mesh names its devices")
    if device is not None and placements is not None:
        raise ValueError(
            f"{name}(): device= and placements= cannot be given together; give device_mesh= and placements="
        )
    if device is not None:
        device = torch.device(device)
        if device.type == "cuda":
            return DeviceMesh(f"cuda:{device.index or 0}"), PlacementList((REPLICATE,))
        if device.type not in ("cpu", torch_internals.BACKEND):
            raise ValueError(f"{name}(): device must be a cpu, cuda or dtorch device, got {str(device)!r}")
    if device_mesh is None:
        if placements is None:
            chosen = runtime.chosen_mesh()
            return None if chosen is None else (chosen, PlacementList((REPLICATE,) * chosen.ndim))
        device_mesh = runtime.get_default_mesh()
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"{name}(): argument 'device_mesh' must be a DeviceMesh, got {type(device_mesh).__name__}")
    if placements is None:
        return device_mesh, PlacementList((REPLICATE,) * device_mesh.ndim)
    return device_mesh, normalize(placements, device_mesh.ndim, ndim)


def _place(plain: torch.Tensor, where: tuple[DeviceMesh, PlacementList] | None, requires_grad: bool) -> Tensor:
    tensor = host.make(plain) if where is None else host.from_plain(plain, *where)
    return tensor.requires_grad_(True) if requires_grad else tensor


def from_torch(
    data: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """A dtorch tensor with the values of a plain one, copied; ``requires_grad`` is kept.

    Args:
        data: a dense plain tensor.
        device_mesh: where to; uncommitted without mesh and placements.
        placements: one per mesh axis; replicated if only a mesh is given. Under ``Partial()`` the first device holds the values.

    Raises:
        TypeError: not a tensor; sparse, nested or quantised.
    """
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"from_torch(): argument 'data' must be a torch.Tensor, not {type(data).__name__}")
    if isinstance(data, Tensor):
        return data if device_mesh is None and placements is None else data.redistribute(device_mesh, placements)
    where = _where("from_torch", data.ndim, None, device_mesh, placements)
    if where is None:
        host.check_dense(data)
        return _place(data.detach().clone(), None, data.requires_grad)
    return _place(data, where, data.requires_grad)


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """`from_torch` under the name and argument order of ``torch.distributed.tensor``; on one device mesh if none is given."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor(): argument 'tensor' must be a torch.Tensor, not {type(tensor).__name__}")
    mesh = runtime.get_default_mesh() if device_mesh is None else device_mesh
    return from_torch(tensor, mesh, placements)


def from_numpy(
    array: Any, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """A dtorch tensor with the values of a numpy array, copied."""
    return from_torch(torch.from_numpy(array), device_mesh, placements)


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
    """``torch.tensor``, placed."""
    if isinstance(data, Tensor):
        found = data.detach().clone()
        if dtype is not None:
            found = found.to(dtype)
        if device_mesh is not None or placements is not None:
            found = found.redistribute(device_mesh, placements)
        return found.requires_grad_(requires_grad)
    plain = data.detach().clone() if isinstance(data, torch.Tensor) else torch.tensor(data, dtype=dtype, device="cpu")
    if dtype is not None:
        plain = plain.to(dtype)
    return _place(plain, _where("tensor", plain.ndim, device, device_mesh, placements), requires_grad)


def as_tensor(
    data: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """``torch.as_tensor``, placed; a dtorch tensor of that dtype is returned as it is."""
    if isinstance(data, Tensor) and device_mesh is None and placements is None:
        return data if dtype is None else data.to(dtype)
    return tensor(data, dtype=dtype, device=device, device_mesh=device_mesh, placements=placements)


def _factory(name: str) -> Any:
    """The dtorch form of ``torch.<name>``: the same arguments, and ``device_mesh=`` and ``placements=``."""
    make = getattr(torch, name)
    fill = RANDOM_FILLS.get(name)

    def factory(
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        device: Any = None,
        requires_grad: bool = False,
        out: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        if out is not None:
            raise TypeError(f"{name}(): out= is not supported; write x.copy_(dtorch.{name}(...)) instead")
        kwargs.pop("pin_memory", None)
        _check_generator(name, kwargs.get("generator"))
        # torch itself checks the arguments and says shape and dtype; no memory is touched on the meta device.
        checked = {k: v for k, v in kwargs.items() if k != "generator"}
        shaped = make(*args, device="meta", **checked)
        where = _where(name, shaped.ndim, device, device_mesh, placements)
        if where is not None and not _from_client(name, kwargs):
            mesh, placed = where
            settled = PlacementList(REPLICATE if is_partial(p) else p for p in placed)
            spec = Spec.of(intern_mesh(mesh), settled, shaped.shape, None, shaped.dtype)
            made = FILLS[name](spec, args, kwargs) if fill is None else fill(spec, args, kwargs)
            if settled != placed:
                with torch.no_grad():
                    made = made.redistribute(mesh, placed)
            return made.requires_grad_(True) if requires_grad else made
        return _place(make(*args, device="cpu", **kwargs), where, requires_grad)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"``torch.{name}``, with ``device_mesh=`` and ``placements=``; uncommitted with neither."
    return factory


def _check_generator(name: str, generator: Any) -> None:
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"{name}(): expected a CPU generator, got one of {generator.device}")


def _from_client(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the values are made here and sent: whatever is no fill, and random values that must be torch's own."""
    if name in RANDOM_FILLS:
        return kwargs.get("generator") is not None or runtime.controller().config.random == "torch"
    return name not in FILLS


def _uniform(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    return random_ops.generate(aten.uniform_.default, [], spec)


def _normal(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    return random_ops.generate(aten.normal_.default, [], spec)


def _integers(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    bounds = [a for a in args if isinstance(a, int)]
    low, high = kwargs.get("low", 0), kwargs.get("high")
    if len(bounds) == 2:
        low, high = bounds
    elif len(bounds) == 1:
        low, high = (bounds[0], high) if high is not None else (low, bounds[0])
    return random_ops.generate(getattr(aten.random_, "from"), [low, high], spec)


def _filled(value: Any) -> Any:
    def make(spec: Spec, args: Any, kwargs: Any) -> Tensor:
        return random_ops.filled(spec, value)

    return make


def _full(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
    return random_ops.filled(spec, value.item() if isinstance(value, torch.Tensor) else value)


RANDOM_FILLS: dict[str, Any] = {"rand": _uniform, "randn": _normal, "randint": _integers}
FILLS: dict[str, Any] = {"zeros": _filled(0), "ones": _filled(1), "empty": _filled(0), "full": _full}

zeros = _factory("zeros")
ones = _factory("ones")
full = _factory("full")
empty = _factory("empty")
arange = _factory("arange")
linspace = _factory("linspace")
logspace = _factory("logspace")
eye = _factory("eye")
rand = _factory("rand")
randn = _factory("randn")
randint = _factory("randint")
randperm = _factory("randperm")
tril_indices = _factory("tril_indices")
triu_indices = _factory("triu_indices")
hann_window = _factory("hann_window")
hamming_window = _factory("hamming_window")
blackman_window = _factory("blackman_window")
bartlett_window = _factory("bartlett_window")
kaiser_window = _factory("kaiser_window")
empty_strided = _factory("empty_strided")
empty_permuted = _factory("empty_permuted")
scalar_tensor = _factory("scalar_tensor")


def _like(name: str) -> Any:
    """``torch.<name>_like`` that can also be told where to; without that it follows its source."""
    make = getattr(torch, f"{name}_like")

    def like(
        source: torch.Tensor,
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if isinstance(source, Tensor):
            made = make(source, *args, **kwargs)
            if device_mesh is not None or placements is not None:
                made = made.redistribute(device_mesh, placements)
        else:
            plain = make(source, *args, **{k: v for k, v in kwargs.items() if k != "device"}, device="cpu")
            made = from_torch(plain, device_mesh, placements)
        return made.requires_grad_(True) if requires_grad else made

    like.__name__ = like.__qualname__ = f"{name}_like"
    like.__doc__ = f"``torch.{name}_like``: on the source's mesh and placements unless told otherwise."
    return like


zeros_like = _like("zeros")
ones_like = _like("ones")
empty_like = _like("empty")
full_like = _like("full")
rand_like = _like("rand")
randn_like = _like("randn")
randint_like = _like("randint")
