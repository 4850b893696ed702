"""``out=``: where an op is to put its result, a dtorch tensor that keeps its placements."""

from __future__ import annotations

from typing import Any

import torch

from ..sharding import checks
from ..sharding.strategy import TensorArg
from ..tensor import Tensor
from . import host, inserted
from .handles import tensors_in
from .rebinding import rebind

aten = torch.ops.aten


def run(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``out=``: computed as without, then copied in, which keeps the destination's placements."""
    result = host.run(info, args, kwargs)
    if result is not NotImplemented:
        return result
    names = [a.name for a in info.outs]
    outs = {name: kwargs[name] for name in names if name in kwargs}
    flat = tensors_in(outs)
    if not any(type(out) is Tensor for out in flat):
        raise TypeError(
            f"{info.name}: out= is a plain torch.Tensor but the inputs are dtorch tensors; "
            "make it with dtorch.from_torch(t, device_mesh=..., placements=...)"
        )
    functional = _functional(info)
    if functional is None:
        return NotImplemented
    given = {name: value for name, value in kwargs.items() if name not in outs}
    _check_out(info, args, given, outs)
    result = functional(*args, **given)
    inputs = tensors_in((args, given))
    for out, value in zip(flat, [result] if isinstance(result, torch.Tensor) else list(result), strict=True):
        if out.shape != value.shape and torch.Tag.pointwise in info.op.tags and any(out is t for t in inputs):
            raise RuntimeError(
                f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(value.shape)}"
            )
        _store(info, out, value)
    if info.structure == "none":
        return None
    values = list(outs.values())
    return values[0] if len(values) == 1 else tuple(values)


def _check_out(info: Any, args: Any, kwargs: dict[str, Any], outs: dict[str, Any]) -> None:
    """Raise what torch's kernel says of the dtype of a destination."""

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorArg(0, tuple(value.shape), value.stride(), value.dtype)
        return [described(item) for item in value] if isinstance(value, (list, tuple)) else value

    def empty(value: Any) -> Any:  # which any result may resize
        return (
            [empty(item) for item in value]
            if isinstance(value, (list, tuple))
            else TensorArg(0, (0,), (1,), value.dtype)
        )

    destinations = {name: empty(value) for name, value in outs.items()}
    named = {name: described(value) for name, value in kwargs.items()}
    checks.check(info.op, [described(a) for a in args], {**named, **destinations})


def _store(info: Any, out: Any, value: Any) -> None:
    if type(out) is not Tensor:  # a temporary of torch's own beside an output of ours
        plain = value.to_torch()
        out.resize_(plain.shape).copy_(plain)
        return
    if not torch.can_cast(value.dtype, out.dtype):
        raise RuntimeError(
            f"result type {_scalar_name(value.dtype)} can't be cast to the desired output type {_scalar_name(out.dtype)}"
        )
    if out.shape == value.shape:
        aten.copy_.default(out, value)
        return
    if type(value) is not Tensor:  # of plain inputs
        value = host.from_plain(value, out.device_mesh)
    value = value.to(out.dtype)
    if out._spec is not None and value.device_mesh == out._spec.mesh and value.ndim == len(out._spec.shape):
        if value._spec is not None:
            goal = value._spec.with_placements(out._spec.placements)
            inserted.tell(info.name, [value._spec], [(value._spec, goal)], False, None)
        value = value.redistribute(out._spec.mesh, out._spec.placements)
    rebind(out, value)


def _scalar_name(dtype: torch.dtype) -> str:
    names = {
        torch.float32: "Float",
        torch.float64: "Double",
        torch.int64: "Long",
        torch.int32: "Int",
        torch.bool: "Bool",
    }
    names |= {torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte", torch.float16: "Half"}
    names |= {torch.bfloat16: "BFloat16", torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble"}
    return names.get(dtype, str(dtype))


def _functional(info: Any) -> Any:
    """The overload that takes the same arguments without ``out=``; None if there is none."""
    packet = info.op.overloadpacket
    wanted = [(a.name, str(a.type)) for a in info.op._schema.arguments if not a.is_out]
    for name in packet.overloads():
        overload = getattr(packet, name)
        if [(a.name, str(a.type)) for a in overload._schema.arguments] == wanted:
            return overload
    return None
