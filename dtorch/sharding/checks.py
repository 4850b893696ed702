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
    if suspect is not None and suspect(args, kwargs) and shapes._elements(tuple(args)) <= shapes.REPEATED:
        shapes.by_kernel(op, args, kwargs)
    fill = _FILLS.get(op)
    if fill is None:
        fill = _FILLS[op] = _fill_of(op)
    if fill < 0:
        return
    key = (op, *map(_key, args), *kwargs, *map(_key, kwargs.values()))
    if key in _PASSED:
        return
    with torch.no_grad():
        op(*[_small(a, fill) for a in args], **{name: _small(value, fill) for name, value in kwargs.items()})
    if len(_PASSED) >= REMEMBERED:
        _PASSED.clear()
    _PASSED.add(key)


def _key(value: Any) -> Any:
    """What legality may depend on: of a float only that it is one."""
    if hasattr(value, "stride"):
        return (value.dtype, *[n if n < 2 else 2 for n in value.shape])
    if type(value) in (list, tuple):
        return tuple(map(_key, value))
    return type(value) if isinstance(value, (float, complex)) else (type(value), value)


def _small(value: Any, fill: int) -> Any:
    """A stand-in of at most two elements a dim, which keeps what broadcasts, matches or is empty as it is."""
    if hasattr(value, "stride"):
        return torch.full([n if n < 2 else 2 for n in value.shape], fill, dtype=value.dtype, device="cpu")
    if type(value) in (list, tuple):
        return [_small(item, fill) for item in value]
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
        aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    }
)  # fmt: skip

#: Reductions that would warn of having too few elements.
WARN = frozenset({aten.var, aten.std, aten.var_mean, aten.std_mean})

_FILLS: dict[Any, int] = {}


def _fill_of(op: Any) -> int:
    """The value of an op's small stand-ins; -1 for an op that is not run on them."""
    if op in ANY_SIZE:
        return 0
    if torch.Tag.nondeterministic_seeded in op.tags or op.namespace != "aten" or op.overloadpacket in WARN:
        return -1
    return 1 if torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags else -1  # 1: no integer division by 0


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


#: Op → whether its arguments look as if they do not fit.
SUSPECTS: dict[Any, Callable[[Sequence[Any], Mapping[str, Any]], bool]] = {
    aten.convolution.default: _convolution,
    aten.index.Tensor: _masks,
    aten.index_put.default: _masks,
    aten.index_put_.default: _masks,
}
