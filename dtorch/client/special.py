"""Ops the client runs in a way of its own: an entry each, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import DeviceUnavailable
from ..sharding.layout import stride_order
from ..tensor import Tensor
from . import (
    attention,
    destinations,
    host,
    norms,
    packed,
    packed_shards,
    products,
    random_ops,
    rebinding,
    redistribute,
    torch_internals,
    watch,
)
from .handles import tensors_in

aten = torch.ops.aten

Handler = Callable[[Any, Any, dict[str, Any]], Any]


def handler_for(info: Any) -> Handler | None:
    """The client's own way of running an op; None for the common way."""
    found = HANDLERS.get(info.op)
    if found is not None:
        return found
    if info.op in random_ops.RANDOM_OPS:
        return random_ops.run
    if info.outs:
        return destinations.run
    if info.op in rebinding.IN_PLACE_VIEWS:
        return rebinding.run_in_place_view
    if info.is_composite:  # under inference_mode composites arrive whole
        return decompose
    if "device" in info.by_name:
        return run_with_device
    if info.op in FILLS_PLAIN:
        return fill_plain
    return None


def decompose(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run the ops that it is made of. Some decompositions are Python (stft) and compare ``.device``s, so plain tensors are placed first."""
    if any(type(t) is not Tensor for t in tensors_in((args, kwargs))):
        mesh = host.mesh_of(args, kwargs)
        if mesh is None:
            return host.run(info, args, kwargs)
        args, kwargs = host.place(info, args, kwargs, mesh)
    return info.op.decompose(*args, **kwargs)


def run_with_device(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Factories of the ``*_like`` and ``new_*`` kinds, and casts: the result stays on the source's mesh."""
    from .dispatch import call

    device = kwargs.get("device")
    if device is not None:
        device = torch.device(device)
        if device.type == "meta":
            return _on_meta(info, args, kwargs)
        if device.type not in ("cpu", torch_internals.BACKEND):
            raise DeviceUnavailable(
                f"{info.name}: cannot move a dtorch tensor to {str(device)!r}; "
                f"use x.redistribute(device_mesh=dtorch.DeviceMesh({device.type!r}, ...))"
            )
    if kwargs.get("layout") not in (None, torch.strided):
        raise TypeError(f"{info.name}: dtorch supports dense tensors only, got layout={kwargs['layout']}")
    dropped = ("device", "pin_memory", "layout", "non_blocking")
    return call(info, args, {name: value for name, value in kwargs.items() if name not in dropped})


def _on_meta(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return [convert(item) for item in value]
        return value

    return info.op(*[convert(a) for a in args], **{name: convert(v) for name, v in kwargs.items()})


def fill_plain(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``plain.copy_(x)`` and ``plain[...] = x`` wait and fill; other plain destinations are errors (in `place`)."""
    target = args[0] if args else None
    if isinstance(target, torch.Tensor) and type(target) is not Tensor:

        def fetch(value: Any) -> Any:
            if type(value) is Tensor:
                return value.to_torch()
            return [fetch(item) for item in value] if isinstance(value, (list, tuple)) else value

        return info.op(target, *[fetch(a) for a in args[1:]], **{name: fetch(v) for name, v in kwargs.items()})
    return NotImplemented


FILLS_PLAIN = {aten.copy_.default, aten.index_put_.default, aten._index_put_impl_.default, aten.masked_fill_.Tensor}


def dropout(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Out of training torch's own kernel gives the tensor itself; the Python that `decompose` runs copies it."""
    x, p, train = args
    return decompose(info, args, kwargs) if train and p != 0 else x


def as_strided(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Devices hold parts, laid out anew: a window over a whole tensor can be taken, one over what lies around a view cannot."""
    from .dispatch import call

    x = args[0]
    if type(x) is not Tensor or x._spec is None:
        return NotImplemented
    size, stride, offset = (
        info.value_of(info.by_name[name], args, kwargs) for name in ("size", "stride", "storage_offset")
    )
    whole = x.untyped_storage().nbytes() == x.nbytes
    reach = 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    order = stride_order(tuple(x.shape), x.stride())
    if not x.permute(order).is_contiguous() or (offset is not None and not whole) or (offset or 0) + reach > x.numel():
        raise RuntimeError(
            f"as_strided: size {list(size)}, stride {list(stride)} and storage_offset {offset} reach beyond the elements of this dtorch "
            "tensor, which is a view of part of another; call as_strided on the tensor it is a view of, or index that"
        )
    flat = x.permute(order).view(-1)
    return call(info, (flat[offset:] if offset else flat, size, stride), {})


def item(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    recorder = watch.recorder()
    if recorder is not None:
        return recorder.read(args[0])
    if args[0]._spec is None and args[0]._host.root.joined is None:
        return args[0]._host.plain.item()
    return args[0].to_torch().item()


def equal(info: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Compared on the workers; only the answer comes back."""
    a, b = args
    if a.shape != b.shape:
        return False
    if not a.numel():
        return True
    return bool(torch.ops.aten.eq.Tensor(a, b).all())


def allclose(info: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """As torch composes it; its own kernel returns a Python bool, which workers cannot."""
    return bool(torch.isclose(*args, **kwargs).all())


def tensor_split(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    from . import composites

    return composites.tensor_split(*args, **kwargs)


def is_same_size(info: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return args[0].shape == args[1].shape


def is_pinned(info: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return False


def refuse_resize(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    x, size = args[0], args[1] if len(args) > 1 else kwargs.get("size")
    if tuple(size.shape if isinstance(size, torch.Tensor) else size) == tuple(x.shape):
        return x
    raise RuntimeError(
        f"{info.name}: a dtorch tensor cannot be resized in place, its memory is spread over {x.device_mesh}; "
        "make a new one, e.g. torch.empty_like or x.reshape"
    )


def refuse_sparse(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise TypeError(
        f"{info.name}: dtorch supports dense tensors only; make it sparse on the client: x.to_torch().to_sparse()"
    )


def refuse_set(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"{info.name}: a dtorch tensor has no storage in this process; only x.set_(another dtorch tensor) is supported"
    )


def refuse_quantised(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    raise TypeError(
        f"{info.name}: dtorch does not support quantised tensors; quantise on the client: call it on x.to_torch()"
    )


HANDLERS: dict[Any, Handler] = {
    aten.dropout.default: dropout,
    aten.detach.default: rebinding.same_handle,
    aten.alias.default: rebinding.same_handle,
    aten.lift_fresh.default: rebinding.same_handle,
    aten._local_scalar_dense.default: item,
    aten.equal.default: equal,
    aten.allclose.default: allclose,
    aten.tensor_split.tensor_indices_or_sections: tensor_split,
    aten.scaled_dot_product_attention.default: attention.run,
    **dict.fromkeys(products.WHOLE, products.run),
    norms.RMS_NORM: norms.run,
    aten.is_same_size.default: is_same_size,
    aten.is_pinned.default: is_pinned,
    aten.resize_.default: refuse_resize,
    aten.resize_as_.default: refuse_resize,
    aten.set_.source_Tensor: rebinding.set_source,
    aten.set_.default: refuse_set,
    aten.set_.source_Storage: refuse_set,
    aten.set_.source_Storage_storage_offset: refuse_set,
    aten.set_.source_Tensor_storage_offset: refuse_set,
    aten.as_strided.default: as_strided,
    aten._to_sparse.default: refuse_sparse,
    aten._to_sparse.sparse_dim: refuse_sparse,
    aten._to_sparse_csr.default: refuse_sparse,
    aten._to_sparse_csc.default: refuse_sparse,
    aten._to_sparse_bsr.default: refuse_sparse,
    aten._to_sparse_bsc.default: refuse_sparse,
    aten.to_mkldnn.default: refuse_sparse,
    aten._pack_padded_sequence.default: packed.pack,
    aten._pack_padded_sequence_backward.default: packed.pack_backward,
    aten.cat.default: packed_shards.cat,
    aten.quantize_per_tensor.default: refuse_quantised,
    aten.quantize_per_tensor.tensor_qparams: refuse_quantised,
    aten.quantize_per_tensor.tensors: refuse_quantised,
    aten.quantize_per_tensor_dynamic.default: refuse_quantised,
    aten.quantize_per_channel.default: refuse_quantised,
    torch.ops.dtorch.redistribute.default: redistribute.run,
}
