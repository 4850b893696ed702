"""What torch's CPU kernels refuse though its meta kernels let it pass, refused at the call: dtypes a kernel lacks or that differ, a
sort along a dim that is not there.

An op that needs no particular sizes or values is run for real once per combination of types, on tensors of at most two elements a
dim; `SUSPECTS` says which calls of other ops look so wrong that they are run at their true size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import shapes

aten = torch.ops.aten

#: Legal combinations of op, dtypes, ranks and constants.
_PASSED: set[tuple[Any, ...]] = set()
#: Forgotten above this: constants may go on and on.
REMEMBERED = 16384


def check(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise what the CPU kernel raises for dtypes, dims and constants that do not fit together.

    Args:
        args, kwargs: the call's, with an object that has ``shape``, ``stride`` and ``dtype`` attributes for each tensor.
    """
    suspect = SUSPECTS.get(op)
    if ((suspect is not None and suspect(args, kwargs)) or _overlaps(op, args)) and _is_repeatable(args):
        _run(op, args, kwargs, 0, small=False)
    fill = _FILLS.get(op)
    if fill is None:
        fill = _FILLS[op] = _fill_of(op)
    if fill < 0:
        return
    key = (op, *map(_key, args), *kwargs, *map(_key, kwargs.values()))
    if key in _PASSED:
        return
    try:
        _run(op, args, kwargs, fill, small=True)
        passed = True
    except Exception:
        passed = False
    if not passed:  # raised out here, once: the same refusal, with the true sizes in its words where it can have them
        if _is_repeatable(args):
            _run(op, args, kwargs, fill, small=False)
        _run(op, args, kwargs, fill, small=True)
    if len(_PASSED) >= REMEMBERED:
        _PASSED.clear()
    _PASSED.add(key)


def _is_repeatable(args: Sequence[Any]) -> bool:
    return shapes._elements(tuple(args)) <= shapes.REPEATED


def _run(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fill: int, small: bool) -> None:
    with torch.no_grad():
        op(
            *[_stand_in(a, fill, small) for a in args],
            **{name: _stand_in(value, fill, small) for name, value in kwargs.items()},
        )


def _overlaps(op: Any, args: Sequence[Any]) -> bool:
    """Whether an in-place op's target has several elements in one place, as after ``expand``."""
    if torch.Tag.inplace not in op.tags:
        return False
    target = args[0]
    return hasattr(target, "stride") and any(n > 1 and s == 0 for n, s in zip(target.shape, target.stride, strict=True))


def _key(value: Any) -> Any:
    """What legality may depend on: of a float only that it is one."""
    if hasattr(value, "stride"):
        return (value.dtype, *[n if n < 2 else 2 for n in value.shape])
    if type(value) in (list, tuple):
        return tuple(map(_key, value))
    return type(value) if isinstance(value, (float, complex)) else (type(value), value)


def _stand_in(value: Any, fill: int, small: bool) -> Any:
    """A tensor in place of a `TensorArg`; a small one has at most two elements a dim, which keeps what broadcasts, matches or is empty."""
    if hasattr(value, "stride"):
        if small:
            return torch.full([min(n, 2) for n in value.shape], fill, dtype=value.dtype, device="cpu")
        reach = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True) if n)
        return torch.full((reach,), fill, dtype=value.dtype, device="cpu").as_strided(value.shape, value.stride)
    if type(value) in (list, tuple):
        return [_stand_in(item, fill, small) for item in value]
    return torch.device("cpu") if type(value) is torch.device else value


#: Ops, beside pointwise ones and reductions, that run on any sizes which are equal, 1 or 0 where the true ones are, all values being 0.
ANY_SIZE = frozenset(
    {
        aten._softmax.default, aten._log_softmax.default, aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default,
        aten.cummax.default, aten.cummin.default, aten.sort.default, aten.sort.stable, aten.median.dim,
        aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default, aten.dot.default,
        aten.addmv.default, aten.addr.default,
        aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.index_select.default,
        aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar, aten.embedding.default,
        aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.masked_select.default,
        aten.bucketize.Tensor, aten.searchsorted.Tensor, aten.complex.default, aten.polar.default, aten.nonzero.default,
        aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.mode.default, aten._cdist_forward.default,
        aten.median.default, aten.nanmedian.default, aten.nanmedian.dim, aten.trace.default, aten._unique2.default, aten.bincount.default,
    }
)  # fmt: skip

#: Reductions that would warn of having too few elements.
WARN = frozenset({aten.var, aten.std, aten.var_mean, aten.std_mean})

_FILLS: dict[Any, int] = {}


def _fill_of(op: Any) -> int:
    """The value of an op's small stand-ins; -1 for an op that is not run on them."""
    if torch.Tag.inplace in op.tags:  # the tags of its functional form say more
        op = _functional(op) or op
    if op in ANY_SIZE:
        return 0
    if torch.Tag.nondeterministic_seeded in op.tags or op.namespace != "aten" or op.overloadpacket in WARN:
        return -1
    return 1 if torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags else -1  # 1: no integer division by 0


def _functional(op: Any) -> Any:
    """``aten.eq.Tensor`` of ``aten.eq_.Tensor``; None if there is none."""
    packet = getattr(aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, op._schema.overload_name or "default", None)


def _convolution(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    _, weight, bias, _, _, _, transposed, _, groups = args
    if len({t.dtype for t in args[:3] if t is not None}) > 1:
        return True
    return bias is not None and tuple(bias.shape) != (weight.shape[1] * groups if transposed else weight.shape[0],)


def _masks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a mask is unlike the dims it is for."""
    dim, shape = 0, tuple(args[0].shape)
    for index in args[1]:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            dim += 1
        else:
            if shape[dim : dim + len(index.shape)] != tuple(index.shape):
                return True
            dim += len(index.shape)
    return False


def _written_by_index(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a mask is unlike the dims it is for, or the values are of another dtype or shape than the place they go to."""
    if _masks(args, kwargs):
        return True
    target, indices, values = args[:3]
    if values.dtype != target.dtype:
        return True
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
        return False  # only the values say how many places there are
    at = [dim for dim, index in enumerate(indices) if index is not None]
    together = list(torch.broadcast_shapes(*[tuple(index.shape) for index in indices if index is not None]))
    rest = [n for dim, n in enumerate(target.shape) if dim not in at]
    before = at[0] if at and at == list(range(at[0], at[-1] + 1)) else 0
    place = rest[:before] + together + rest[before:]
    shape = tuple(values.shape)
    return len(shape) > len(place) or any(n not in (1, p) for n, p in zip(reversed(shape), reversed(place)))  # noqa: B905 - from the last


def _not_floating(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return not (args[0].dtype.is_floating_point or args[0].dtype.is_complex)


def _lengths(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the lengths of a CTC loss are no integers."""
    return any(t.dtype.is_floating_point for t in args[2:4])


#: Op → whether its arguments look as if they do not fit.
SUSPECTS: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], bool]] = {
    aten.convolution.default: _convolution,
    aten.index.Tensor: _masks,
    aten.index_put.default: _written_by_index,
    aten.index_put_.default: _written_by_index,
    aten._ctc_loss.Tensor: _lengths,
    **{op.correction: _not_floating for op in WARN},
}
