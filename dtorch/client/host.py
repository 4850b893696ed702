"""Uncommitted tensors: made without a mesh, held in the client's memory until they meet a placed one.

Their ops run on the client at once (masks, positions: small, no messages). One that meets a placed tensor joins its mesh as a
replicated value; as the destination of an in-place write it takes the source's placements. Its views join with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import DTorchError
from ..interrupts import critical
from ..mesh import DeviceMesh
from ..placement import REPLICATE, PlacementList, along, boxed, is_packed, is_split
from ..sharding.layout import stride_order
from ..sharding.spec import Spec, intern_mesh, replicated
from ..tensor import Tensor
from . import leaves, torch_internals, watch
from .handles import rebound, tensors_in, wrap


class HostRoot:
    """The client memory that an uncommitted tensor and its views share, and where it went when one of them joined a mesh.

    ``joined`` is then a placed, contiguous tensor over the whole memory, of which each handle becomes a view when it is next used.
    """

    __slots__ = ("handles", "joined")

    def __init__(self) -> None:
        self.handles = 0
        self.joined: Tensor | None = None


class HostHandle:
    """One uncommitted tensor: its plain tensor and its root. Counts the handles of the root."""

    __slots__ = ("plain", "root")

    def __init__(self, plain: torch.Tensor, root: HostRoot) -> None:
        self.plain = plain
        self.root = root
        root.handles += 1

    @critical  # an interrupted finalizer would leave the root a handle too many, and the Ctrl-C would be lost
    def __del__(self) -> None:
        self.root.handles -= 1


def make(plain: torch.Tensor, root: HostRoot | None = None) -> Tensor:
    """An uncommitted tensor over the memory of ``plain``."""
    recorder = watch.recorder()
    if recorder is not None:
        recorder.uncommitted(plain)
    if torch.is_grad_enabled():
        with torch.no_grad():
            tensor = torch_internals.make_subclass(Tensor, plain)
    else:
        tensor = torch_internals.make_subclass(Tensor, plain)
    tensor._spec = None
    tensor._value = None
    tensor._host = HostHandle(plain, HostRoot() if root is None else root)
    return tensor


def run(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op among uncommitted and plain tensors on the client; `NotImplemented` if one is placed, or a view of one that is by now."""
    ours: list[Tensor] = []
    try:
        plain_args = [_strip(a, ours) for a in args]
        plain_kwargs = {name: _strip(v, ours) for name, v in kwargs.items()} if kwargs else {}
    except _Placed:
        return NotImplemented
    if "device" in plain_kwargs and torch_internals.is_our_device(plain_kwargs["device"] or "cpu"):
        plain_kwargs["device"] = torch_internals.CPU
    recorder = watch.recorder()
    with torch_internals.without_dispatch():
        if recorder is None:
            result = torch_internals.direct(info.op)(*plain_args, **plain_kwargs)
        else:
            result = recorder.plain_op(info.op, plain_args, plain_kwargs)
    if info.makes_fresh:
        return _wrap(result, ())
    if info.is_mutable:
        for tensor in ours:
            _follow(tensor)
    return _wrap(result, ours)


def factory(op: Any) -> Any:
    """torch's kernel of an op that takes no tensor, for our device: what it makes is uncommitted."""
    call = torch_internals.direct(op)

    def kernel(
        *args: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> torch.Tensor:
        recorder = watch.recorder()
        if recorder is None:
            return make(call(*args, dtype=dtype, device=torch_internals.CPU))
        return make(recorder.plain_op(op, args, {"dtype": dtype, "device": torch_internals.CPU}))

    return kernel


def _follow(tensor: Tensor) -> None:
    """Give a handle the shape that its plain tensor has now: ``torch.arange`` resizes an empty one, and so does any ``out=``."""
    plain = tensor._host.plain
    if plain.shape != tensor.shape or plain.stride() != tensor.stride():
        torch_internals.set_data(tensor, torch_internals.make_subclass(Tensor, plain))


# Plain functions, not closures that call themselves: those would keep the tensors alive until a garbage collection.
def _strip(value: Any, ours: list[Tensor]) -> Any:
    """The plain tensors of uncommitted ones, which are collected in ``ours``."""
    if type(value) is Tensor:
        handle = value._host
        if handle is None or handle.root.joined is not None:
            raise _Placed
        ours.append(value)
        return handle.plain
    if isinstance(value, (list, tuple)):
        return [_strip(item, ours) for item in value]
    return value


def _wrap(value: Any, ours: Sequence[Tensor]) -> Any:
    """Uncommitted tensors for plain results; of ``ours`` an in-place op's own, and the root of what a view shares memory with."""
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            return value
        for tensor in ours:
            if tensor._host.plain is value:
                return tensor
        storage = value.untyped_storage()._cdata if ours else 0
        for tensor in ours:
            if tensor._host.plain.untyped_storage()._cdata == storage:
                return make(value, tensor._host.root)
        return make(value)
    if isinstance(value, list):
        return [_wrap(item, ours) for item in value]
    if isinstance(value, tuple):
        return tuple([_wrap(item, ours) for item in value])
    return value


class _Placed(Exception):
    pass


def mesh_of(args: Any, kwargs: dict[str, Any]) -> DeviceMesh | None:
    """The mesh of the first tensor that is placed, or is a view of one that has been."""
    for tensor in args:
        if type(tensor) is Tensor and tensor._spec is not None:
            return tensor._spec.mesh
    for tensor in tensors_in((args, kwargs)):
        if type(tensor) is Tensor:
            placed = tensor if tensor._spec is not None else tensor._host.root.joined
            if placed is not None:
                return placed._spec.mesh
    return None


def place(info: Any, args: Any, kwargs: dict[str, Any], mesh: DeviceMesh) -> tuple[Any, dict[str, Any]]:
    """Bring every uncommitted or plain tensor of a call to ``mesh``."""
    written = {a.name for a in info.arguments_written(args, kwargs)}
    sources = _placed(args, kwargs) if written else []

    def convert(value: Any, name: str) -> Any:
        is_written = name in written
        if type(value) is Tensor:
            if value._spec is None:
                commit(value, mesh, _like(value, sources, mesh) if is_written else None)
            return value
        if isinstance(value, torch.Tensor):
            if is_written:
                # No TypeError: for ``plain += x`` Python would take it to mean ``plain = plain + x``.
                raise DTorchError(
                    f"{info.name}: argument '{name}' would be written, and is a plain torch.Tensor where another is a dtorch tensor; "
                    "make it one of dtorch's, a module's by dtorch.distribute_module(module, mesh) or module.to(x.device), another by "
                    "dtorch.from_torch(t, device_mesh=..., placements=...); or copy values out with x.to_torch()"
                )
            return from_plain(value, mesh)
        if isinstance(value, (list, tuple)):
            return [convert(item, name) for item in value]
        return value

    arguments = info.arguments
    placed = tuple([convert(v, arguments[i].name) for i, v in enumerate(args)])
    return placed, {name: convert(v, name) for name, v in kwargs.items()}


def _placed(args: Any, kwargs: dict[str, Any]) -> list[Spec]:
    return [t._spec for t in tensors_in((args, kwargs)) if type(t) is Tensor and t._spec is not None]


def _like(tensor: Tensor, sources: list[Spec], mesh: DeviceMesh) -> PlacementList | None:
    """The placements an uncommitted destination takes of the tensor written into it: shards of dims of equal size."""
    shape = tensor._host.plain.shape
    for spec in reversed(sources):
        if len(spec.shape) == len(shape) and spec.mesh == mesh:
            return PlacementList(
                p if p.is_shard() and shape[p.dim] == spec.shape[p.dim] else REPLICATE for p in spec.placements
            )
    return None


def commit(tensor: Tensor, mesh: DeviceMesh, placements: PlacementList | None = None) -> None:
    """Make an uncommitted tensor a placed one, on the same handle."""
    from . import runtime

    handle = tensor._host
    plain, root = handle.plain, handle.root
    mesh = intern_mesh(mesh)
    is_alone = root.handles == 1
    is_lazy = plain.is_conj() or plain.is_neg()
    is_all = plain.is_contiguous() and plain.nbytes == plain.untyped_storage().nbytes() and not is_lazy
    if root.joined is None and (is_alone or is_all):
        spec = Spec.of(mesh, (is_alone and placements) or replicated(mesh), plain.shape, None, plain.dtype)
        tensor._value = runtime.controller().put(plain, spec, alone=False)
        tensor._spec = spec
        if plain.stride() != spec.stride or is_lazy:
            _as_placed(tensor)
        if not is_alone:
            root.joined = wrap(spec, tensor._value)
        tensor._host = None
        rebound()
        _tell_leaf(tensor)
        return
    is_conj, is_neg = plain.is_conj(), plain.is_neg()
    plain = plain.conj() if is_conj else plain  # which takes the flag off
    plain = torch._neg_view(plain) if is_neg else plain
    if root.joined is None:
        size = plain.untyped_storage().nbytes() // plain.dtype.itemsize
        whole = torch.as_strided(plain.detach(), (size,), (1,), 0)
        root.joined = from_plain(whole, mesh)
    with torch.no_grad():
        flat = root.joined if root.joined.ndim == 1 else root.joined.view(-1)
        if flat.dtype != plain.dtype:
            flat = torch.ops.aten.view.dtype(flat, plain.dtype)
        view = torch.ops.aten.as_strided.default(
            flat, list(plain.shape), list(plain.stride()), plain.storage_offset() if plain.numel() else 0
        )
        view = view.conj() if is_conj else view
        view = torch._neg_view(view) if is_neg else view
    tensor._value = view._value
    tensor._spec = view._spec
    if is_lazy:
        _as_placed(tensor)
    tensor._host = None
    rebound()
    _tell_leaf(tensor)


def _as_placed(tensor: Tensor) -> None:
    """The workers hold it contiguous, or without torch's flag of a lazy view: give the handle the metadata that it has there."""
    torch_internals.set_data(tensor, wrap(tensor._spec, tensor._value))


def _tell_leaf(tensor: Tensor) -> None:
    if tensor._leaf is not None:
        tensor._leaf.spec = tensor._spec
    elif tensor.requires_grad:  # made by a factory of torch's own, which knows no hooks
        leaves.watch(tensor)


def from_plain(tensor: torch.Tensor, mesh: DeviceMesh, placements: PlacementList | None = None) -> Tensor:
    """A placed tensor with the values a plain one has now."""
    from . import redistribute, runtime

    check_dense(tensor)
    mesh = intern_mesh(mesh)
    if placements is not None and any(map(is_packed, placements)):
        made = from_plain(tensor, mesh, boxed(placements))
        return redistribute.move(made, made._spec.with_placements(placements), "place")
    with torch.no_grad():
        plain = tensor.detach()
        if plain.device.type != "cpu":
            plain = plain.cpu()
        placements = placements or replicated(mesh)
        order = stride_order(tuple(plain.shape), plain.stride())
        if plain.is_contiguous() or not plain.permute(order).is_contiguous():
            spec = Spec.of(mesh, placements, plain.shape, None, plain.dtype)
            return wrap(spec, runtime.controller().put(plain, spec))
        # Dense in another order of dims: strides are kept, as torch keeps them.
        plain = plain.permute(order)
        spec = Spec.of(mesh, permuted(placements, order), plain.shape, None, plain.dtype)
        return turned(wrap(spec, runtime.controller().put(plain, spec)), order)


def permuted(placements: PlacementList, order: list[int]) -> PlacementList:
    """The placements of ``x.permute(order)``."""
    return PlacementList(along(p, order.index(p.dim)) if is_split(p) else p for p in placements)  # type: ignore[attr-defined]


def turned(made: Tensor, order: list[int]) -> Tensor:
    """The inverse of ``permute(order)``: a fresh tensor whose dims lie in memory in that order."""
    if order == sorted(order):
        return made
    return made.permute([order.index(dim) for dim in range(len(order))]).detach()  # type: ignore[return-value]


def check_dense(tensor: torch.Tensor) -> None:
    """Raise ValueError for tensors that are not strided arrays of numbers.

    (Not TypeError: an operator that raises one makes Python say "unsupported operand" instead.)
    """
    if tensor.is_nested:
        raise ValueError("dtorch does not support nested tensors: use torch.nested.to_padded_tensor(...)")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"dtorch supports dense tensors only, got a tensor of layout {tensor.layout}: use tensor.to_dense()"
        )
    if tensor.is_quantized:
        raise ValueError("dtorch does not support quantised tensors: use tensor.dequantize()")
    if tensor.is_meta:
        raise ValueError(
            "a tensor on the meta device has no values: make it with torch.empty_like(tensor, device='cpu') first"
        )
