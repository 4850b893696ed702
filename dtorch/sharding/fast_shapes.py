"""Direct formulas for the common families of ops, whose meta kernels cost 50 to 1700 us a call (2 to 8 us here).

Each returns None for whatever is not plain: then torch's meta kernel answers. Result dtypes are not restated here: torch's CPU
kernel is asked once per combination of types, on tiny tensors, for meta kernels skip checks (``int_tensor.mul_(0.5)``) and some
name another type. Plain means contiguous inputs, whose outputs are contiguous too. A call that cannot be legal is REFUSED, and
`shapes.infer` lets torch say why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .rules.pointwise import NOT_POINTWISE
from .spec import contiguous_stride
from .strides import iterated

Meta = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
Outputs = tuple[Meta | None, ...]
REFUSED: Outputs = (None, None, None, None, None, None, None)
"""Not a result: torch raises for this call."""
Formula = Callable[[torch._ops.OpOverload, Sequence[Any], Mapping[str, Any]], Outputs | None]

aten = torch.ops.aten

#: Pointwise ops whose results have other strides than `iterated` says: what is no one iterator's.
NOT_ITERATED = frozenset(
    {
        aten.conj_physical.default,
        aten.ldexp.Tensor,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.mvlgamma.default,
        aten.positive.default,
        aten.threshold_backward.default,
    }
)
#: And those whose results are contiguous whatever the operand is; their meta kernels say otherwise (torch 2.13).
CONTIGUOUS = frozenset({aten.pow.Scalar, aten.float_power.Scalar})

FORMULAS: dict[Any, Formula | None] = {}
_DTYPES: dict[Any, tuple[torch.dtype, ...] | None] = {}


class Tiny:
    """A stand-in tensor for asking about dtypes: 0-d or of one size everywhere."""

    __slots__ = ("shape", "stride", "dtype")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.stride = contiguous_stride(shape)
        self.dtype = dtype


def formula(*ops: Any) -> Callable[[Formula], Formula]:
    def register(function: Formula) -> Formula:
        for op in ops:
            FORMULAS[op] = function
        return function

    return register


def formula_of(op: torch._ops.OpOverload) -> Formula | None:
    """The formula of ``op``; pointwise ops are recognised by torch's tag."""
    try:
        return FORMULAS[op]
    except KeyError:
        returns = op._schema.returns
        plain = (
            len(returns) == 1 and str(returns[0].type) == "Tensor" and not any(a.is_out for a in op._schema.arguments)
        )
        tagged = torch.Tag.pointwise in op.tags and op not in NOT_POINTWISE
        written = op._schema.is_mutable
        found = FORMULAS[op] = (inplace if written else pointwise) if plain and tagged else None
        return found


def _contiguous(t: Any) -> bool:
    return t.stride == contiguous_stride(t.shape)


def _dtypes(
    key: Any, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.dtype, ...] | None:
    """The outputs' dtypes, asked once per ``key`` and default dtype with stand-ins as arguments; None if torch raises."""
    key = (key, torch.get_default_dtype())
    try:
        return _DTYPES[key]
    except KeyError:
        from .shapes import by_kernel, by_meta

        try:
            found = tuple(out[2] for out in by_kernel(op, args, kwargs))  # type: ignore[index]
        except NotImplementedError:
            # This dtype has no CPU kernel; the workers may not be CPUs.
            found = tuple(out[2] for out in by_meta(op, args, kwargs))  # type: ignore[index]
        except Exception:
            found = None
        _DTYPES[key] = found
        return found


def _kind(value: Any) -> Any:
    """What a result's dtype may depend on: of a number only its type."""
    return type(value) if isinstance(value, (int, float, complex)) and type(value) is not bool else value


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The common shape, or None if there is none."""
    longest = max(shapes, key=len)
    if all(s == longest for s in shapes):
        return tuple(longest)
    result = list(longest)
    for shape in shapes:
        offset = len(result) - len(shape)
        for i, size in enumerate(shape):
            if size != 1 and size != result[offset + i]:
                if result[offset + i] != 1:
                    return None
                result[offset + i] = size
    return tuple(result)


def pointwise(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    key: list[Any] = [op]
    shapes = []
    plain = True
    for value in (*args, *kwargs.values()) if kwargs else args:
        if hasattr(value, "stride"):
            plain = plain and value.stride == contiguous_stride(value.shape)
            shapes.append(value.shape)
            key.append((value.dtype, not value.shape))
        elif isinstance(value, (list, torch.memory_format)):
            return None
        else:
            key.append(_kind(value))
    if kwargs:
        key.append(tuple(kwargs))
    if not shapes:
        return None
    shape = broadcast(shapes)
    if shape is None:
        return REFUSED
    dtypes = _dtypes(tuple(key), op, [_tiny(a) for a in args], {k: _tiny(v) for k, v in kwargs.items()})
    if dtypes is None:
        return REFUSED
    if plain or op in CONTIGUOUS:
        return ((shape, contiguous_stride(shape), dtypes[0]),)
    operands = [(tuple(v.shape), v.stride) for v in (*args, *kwargs.values()) if hasattr(v, "stride")]
    if op in NOT_ITERATED or any(
        step == 0 and n > 1 for own, stride in operands for n, step in zip(own, stride, strict=True)
    ):
        from .shapes import by_meta

        found = by_meta(op, args, kwargs)[0]
        return ((found[0], found[1], dtypes[0]),)  # type: ignore[index]
    return ((shape, iterated(shape, operands), dtypes[0]),)


def _tiny(value: Any) -> Any:
    return Tiny((1,) if value.shape else (), value.dtype) if hasattr(value, "stride") else value


def inplace(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """The written tensor itself, if the others broadcast to it."""
    first = args[0]
    found = pointwise(op, args, kwargs)
    if found is None or found is REFUSED:
        return found
    if found[0][0] != tuple(first.shape):  # type: ignore[index]
        return REFUSED
    return ((tuple(first.shape), first.stride, first.dtype),)


def _like_first(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """One output of the first tensor's shape; all tensors of that shape. An int is a dim."""
    return _same_shape(op, args, kwargs, ints_are_dims=True)


def _triangle(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """The same; the int is any diagonal."""
    return _same_shape(op, args, kwargs, ints_are_dims=False) if len(args[0].shape) >= 2 else REFUSED


def _same_shape(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], ints_are_dims: bool
) -> Outputs | None:
    first = args[0]
    shape = first.shape
    key: list[Any] = [op, len(shape) == 0]
    plain = True
    for value in (*args, *kwargs.values()):
        if hasattr(value, "stride"):
            plain = plain and value.shape == shape and _contiguous(value)
            key.append(value.dtype)
        elif isinstance(value, torch.memory_format):
            return None
        elif type(value) is int:
            if ints_are_dims and not -max(len(shape), 1) <= value < max(len(shape), 1):
                return REFUSED
        else:
            key.append(_kind(value))
    if not plain:
        return None
    key.append(tuple(kwargs))
    dtypes = _dtypes(tuple(key), op, [_small(a) for a in args], {k: _small(v) for k, v in kwargs.items()})
    return REFUSED if dtypes is None else ((tuple(shape), contiguous_stride(shape), dtypes[0]),)


def _small(value: Any) -> Any:
    return Tiny((2,) * len(value.shape), value.dtype) if hasattr(value, "stride") else value


formula(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
)(_like_first)
formula(aten.tril.default, aten.triu.default)(_triangle)


@formula(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default)
def reduction(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    x, rest = args[0], list(args[1:])
    shape = x.shape
    if op is aten.linalg_vector_norm.default:
        # An extremum of nothing is an error of the real call.
        if rest and isinstance(rest[0], (int, float)) and math.isinf(rest[0]) and 0 in shape:
            return None
        rest = rest[1:]
    dims, keepdim = (
        kwargs.get("dim", rest[0] if rest else None),
        rest[1] if len(rest) > 1 else kwargs.get("keepdim", False),
    )
    if len(rest) > 2 or not _contiguous(x) or not set(kwargs) <= {"dim", "keepdim", "dtype"}:
        return None
    dims = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
    gone = set()
    for d in dims:
        if not -len(shape) <= d < len(shape) or d % len(shape) in gone:
            return None if not shape else REFUSED
        gone.add(d % len(shape))
    if 0 in shape and op in (aten.amax.default, aten.amin.default):
        return None
    out = tuple([1 if d in gone else n for d, n in enumerate(shape) if keepdim or d not in gone])
    dtype = kwargs.get("dtype")
    extra = {} if dtype is None else {"dtype": dtype}
    order = [2.0] if op is aten.linalg_vector_norm.default else []
    dtypes = _dtypes((op, x.dtype, dtype), op, [Tiny((2, 2), x.dtype), *order, [0]], extra)
    return REFUSED if dtypes is None else ((out, contiguous_stride(out), dtypes[0]),)


@formula(aten.addmm.default)
def addmm(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if len(args) != 3:
        return None
    bias, a, b = args
    if not (bias.dtype == a.dtype == b.dtype) or len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        return REFUSED
    out = (a.shape[0], b.shape[1])
    if len(bias.shape) > 2 or broadcast([tuple(bias.shape), out]) != out:
        return REFUSED
    return ((out, contiguous_stride(out), a.dtype),)


@formula(aten.stack.default)
def stack(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    tensors = args[0]
    if not tensors:
        return None
    first = tensors[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    ndim = len(first.shape) + 1
    if not -ndim <= dim < ndim or not all(
        t.shape == first.shape and t.dtype == first.dtype and _contiguous(t) for t in tensors
    ):
        return None
    dim %= ndim
    out = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    return ((out, contiguous_stride(out), first.dtype),)


@formula(aten.slice.Tensor)
def slice_(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """Bounds count from the end where negative, and are clamped."""
    if kwargs or not all(type(bound) is int or bound is None for bound in args[1:]):
        return None
    x, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    shape = x.shape
    if not -len(shape) <= dim < len(shape) or step is None or step < 1:
        return None
    start, end, step = slice(start, end, step).indices(shape[dim])
    size = max(end - start + step - 1, 0) // step
    dim %= len(shape)
    stride = (*x.stride[:dim], x.stride[dim] * step, *x.stride[dim + 1 :])
    return (((*shape[:dim], size, *shape[dim + 1 :]), stride, x.dtype),)


@formula(aten.native_layer_norm.default)
def layer_norm(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if len(args) != 5:
        return None
    x, normalized, weight, bias, _ = args
    normalized = tuple(normalized)
    batch = len(x.shape) - len(normalized)
    if not normalized or batch < 0 or tuple(x.shape[batch:]) != normalized:
        return REFUSED
    key: list[Any] = [op, x.dtype]
    plain = batch > 0 and _contiguous(x) and 0 not in x.shape
    for t in (weight, bias):
        if t is not None and tuple(t.shape) != normalized:
            return REFUSED
        plain = plain and (t is None or _contiguous(t))
        key.append(None if t is None else t.dtype)
    given = [None if t is None else Tiny((2,), t.dtype) for t in (weight, bias)]
    dtypes = _dtypes(tuple(key), op, [Tiny((2, 2), x.dtype), [2], *given, 1e-5], {})
    if dtypes is None:
        return REFUSED
    if plain:
        stats = (*x.shape[:batch], *[1] * len(normalized))
        stride = contiguous_stride(stats)
        return ((tuple(x.shape), x.stride, dtypes[0]), (stats, stride, dtypes[1]), (stats, stride, dtypes[2]))
    from .shapes import by_meta

    found = by_meta(op, args, kwargs)
    return tuple([(out[0], out[1], dtype) for out, dtype in zip(found, dtypes, strict=True)])  # type: ignore[index]


@formula(aten.rms_norm.default)
def rms_norm(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    x, normalized, *rest = args
    weight = rest[0] if rest else None
    batch = len(x.shape) - len(normalized)
    if kwargs or batch < 0 or not normalized or tuple(x.shape[batch:]) != tuple(normalized) or not _contiguous(x):
        return None
    if weight is not None and (tuple(weight.shape) != tuple(normalized) or weight.dtype != x.dtype):
        return None
    return ((tuple(x.shape), x.stride, x.dtype),) if x.dtype.is_floating_point else None


@formula(aten.native_layer_norm_backward.default)
def layer_norm_backward(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if len(args) != 8:
        return None
    grad, x, normalized, mean, rstd, weight, bias, mask = args
    if grad.shape != x.shape or weight is None or bias is None or 0 in x.shape or not all(mask):
        return None
    if not (grad.dtype == x.dtype == weight.dtype == bias.dtype == mean.dtype == rstd.dtype):
        return None
    if tuple(weight.shape) != tuple(normalized) or not all(map(_contiguous, (grad, x, weight, bias))):
        return None
    side = (tuple(weight.shape), weight.stride, weight.dtype)
    return ((tuple(x.shape), x.stride, x.dtype), side, side)


@formula(aten.nll_loss_forward.default)
def nll_loss(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    if len(args) != 5:
        return None
    x, target, weight, reduction, _ = args
    if len(x.shape) != 2 or tuple(target.shape) != (x.shape[0],) or target.dtype != torch.int64 or weight is not None:
        return None
    if not x.dtype.is_floating_point:
        return None
    out = (x.shape[0],) if reduction == 0 else ()
    return ((out, contiguous_stride(out), x.dtype), ((), (), x.dtype))


@formula(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
    aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default,
)
def batch_norm(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """What is saved has the dtype of the parameters, and is nothing with fixed statistics; the meta kernel says otherwise
    in both (torch 2.13; `test_shapes`)."""
    from .shapes import by_meta

    found = by_meta(op, args, kwargs)
    dtype = torch.float32 if any(t is not None and t.dtype == torch.float32 for t in args[1:5]) else args[0].dtype
    fixed = args[5] is False  # in ops that always train a number stands here
    saved = [((0,) if fixed else out[0], (1,), dtype) for out in found[1:3]]  # type: ignore[index]
    return (found[0], *saved, *found[3:])


def _lists(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """A list op on lists that agree in every shape and floating dtype: like the first list, or in place and so nothing."""
    first = args[0]
    for value in args:
        if type(value) in (list, tuple) and value and hasattr(value[0], "stride"):
            if len(value) != len(first):
                return None
            for t, own in zip(value, first, strict=True):
                if t.shape != own.shape or t.dtype != own.dtype or not _contiguous(t):
                    return None
    if not all(t.dtype.is_floating_point for t in first):
        return None
    if op._schema.is_mutable:
        return (None,)
    return tuple([(tuple(t.shape), t.stride, t.dtype) for t in first])


def _fused(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    return (None,)


formula(
    *(
        getattr(getattr(aten, f"_foreach_{name}"), overload)
        for name, overloads in (
            ("add_", ("List", "Scalar", "ScalarList")), ("add", ("List", "Scalar", "ScalarList")),
            ("sub_", ("List", "Scalar", "ScalarList")), ("sub", ("List", "Scalar", "ScalarList")),
            ("mul_", ("List", "Scalar", "ScalarList", "Tensor")), ("mul", ("List", "Scalar", "ScalarList", "Tensor")),
            ("div_", ("List", "Scalar", "ScalarList", "Tensor")), ("div", ("List", "Scalar", "ScalarList", "Tensor")),
            ("addcmul_", ("Scalar", "ScalarList", "Tensor")), ("addcmul", ("Scalar", "ScalarList", "Tensor")),
            ("addcdiv_", ("Scalar", "ScalarList", "Tensor")), ("addcdiv", ("Scalar", "ScalarList", "Tensor")),
            ("lerp_", ("Scalar", "List")), ("lerp", ("Scalar", "List")),
            ("sqrt", ("default",)), ("sqrt_", ("default",)), ("neg", ("default",)), ("copy_", ("default",)),
            ("zero_", ("default",)), ("reciprocal_", ("default",)), ("maximum_", ("List",)), ("clamp_max_", ("Scalar",)),
        )
        for overload in overloads
    )
)(_lists)  # fmt: skip
formula(
    *(
        getattr(packet, overload)
        for packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)
        for overload in ("default", "tensor_lr")
    )
)(_fused)


@formula(aten._foreach_norm.Scalar)
def foreach_norm(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """One number a tensor."""
    tensors = args[0]
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if kwargs.get("dtype") is not None or len(args) > 2 or not all(t.dtype.is_floating_point for t in tensors):
        return None
    if math.isinf(order) and any(0 in t.shape for t in tensors):
        return None
    return tuple([((), (), t.dtype) for t in tensors])


@formula(aten.normal.Tensor_Tensor)
def normal(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs | None:
    """The kernel makes the mean's dtype; the meta kernel promotes (2.13)."""
    mean, std = args[:2]
    shape = broadcast([mean.shape, std.shape])
    return REFUSED if shape is None else ((shape, contiguous_stride(shape), mean.dtype),)
