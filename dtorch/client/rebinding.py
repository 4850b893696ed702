"""One handle made another: ``x.data = y``, ``x.set_(y)``, in-place views. No value changes; what the tensor is a handle on does."""

from __future__ import annotations

from typing import Any

import torch

from ..tensor import Tensor
from . import handles, host, torch_internals
from .handles import wrap_view

aten = torch.ops.aten


def same_handle(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``detach``, ``alias``: a new handle on the same value; nothing is sent."""
    x = args[0]
    if type(x) is not Tensor:
        return x
    if x._spec is None:
        return host.make(x._host.plain.detach(), x._host.root)
    return wrap_view(x._spec, x._value, x)


def data_of(x: Tensor) -> Tensor:
    """``x.data``: unlike of ``x.detach()``, its writes are none of autograd's business, so it counts versions of its own."""
    if x._spec is None:
        return host.make(x._host.plain.data, x._host.root)
    return wrap_view(x._spec, x._value, x)


def rebind(target: Tensor, source: torch.Tensor) -> None:
    """Make ``target`` a handle on what ``source`` is: value, spec and torch's own metadata together."""
    if type(target) is not Tensor:
        raise TypeError("a plain torch.Tensor cannot be set to a dtorch tensor; make the target with dtorch.from_torch")
    if not isinstance(source, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(source).__name__}")  # torch's words
    if type(source) is not Tensor:  # plain: taken where the target is
        spec = target._spec
        alike = spec is not None and source.shape == spec.shape and not spec.has_partial
        source = (
            host.make(source.clone())
            if spec is None
            else host.from_plain(source, spec.mesh, spec.placements if alike else None)
        )
    handle = same_handle(None, (source,), {})
    torch_internals.set_data(target, handle)
    target._spec, target._value, target._host = handle._spec, handle._value, handle._host
    handles.rebound()
    if target._leaf is not None:
        target._leaf.spec = target._spec


def become(plain: torch.Tensor, source: Tensor) -> None:
    """``plain.data = source``: the plain tensor, or parameter, is a dtorch tensor from now on, the same object."""
    is_parameter = type(plain) is torch.nn.Parameter
    if (
        (not is_parameter and type(plain) is not torch.Tensor)
        or plain._backward_hooks
        or plain._post_accumulate_grad_hooks
    ):
        raise TypeError(
            f"a {type(plain).__name__} with hooks cannot become a dtorch tensor in place; make a new one of its values"
        )
    made = same_handle(None, (source,), {})
    grad = plain.grad
    made = torch.nn.Parameter(made, plain.requires_grad) if is_parameter else made.requires_grad_(plain.requires_grad)
    if grad is not None:
        made.grad = host.make(grad) if made._spec is None else host.from_plain(grad, made._spec.mesh)
    torch.utils.swap_tensors(plain, made)


def set_source(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    rebind(target, source)
    return target


#: In-place views change the handle, not the value: the view they are of.
IN_PLACE_VIEWS = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.as_strided_.default: aten.as_strided.default,
    aten.swapaxes_.default: aten.swapaxes.default,
    aten.swapdims_.default: aten.swapdims.default,
}


def run_in_place_view(info: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        view = IN_PLACE_VIEWS[info.op](*args, **kwargs)
    except (RuntimeError, IndexError):
        view = None
    if view is None:  # say the op's own name, if torch refuses it too
        info.op(torch.empty_strided(args[0].shape, args[0].stride(), device="cpu"), *args[1:], **kwargs)
        view = IN_PLACE_VIEWS[info.op](*args, **kwargs)
    rebind(args[0], view)
    return args[0]
