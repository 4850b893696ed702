"""Shapes, strides and dtypes of an op's outputs from those of its inputs, without data: what torch itself would return.

`infer` asks, in this order: a direct formula for a common family (`fast_shapes`), torch's meta kernels, torch's fake
tensors. An illegal call is run for real, on memory that nobody touches, so that torch's own error is raised: many meta kernels word it
differently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import fast_products, fast_views  # noqa: F401 - they register their formulas
from .fast_shapes import REFUSED, Formula, Meta, formula_of
from .strides import is_channels_last


class DataDependent(Exception):
    """The shape of the op's outputs depends on the values of its inputs, so it has to run first."""


aten = torch.ops.aten

#: Ops whose output sizes depend on values. Their meta kernels may return an upper bound, so they are not asked.
DATA_DEPENDENT = frozenset(
    {
        aten.nonzero.default,
        aten.nonzero_numpy.default,
        aten.argwhere.default,
        aten.masked_select.default,
        aten.unique_dim.default,
        aten.unique_consecutive.default,
        aten.unique_dim_consecutive.default,
        aten._unique.default,
        aten._unique2.default,
        aten.bincount.default,
        aten.repeat_interleave.Tensor,
        aten._local_scalar_dense.default,
        aten.equal.default,
        aten.is_nonzero.default,
        aten.linalg_lstsq.default,
    }
)

#: Ops whose meta kernels ask which device it is, and take a meta tensor's for CUDA (torch 2.13, `device_hint`), where the strides
#: are others: fake tensors say CPU.
ASK_WHICH_DEVICE = frozenset(
    {
        aten._fft_c2c.default,
        aten._fft_r2c.default,
        aten._fft_c2r.default,
        aten.linalg_eig.default,
        aten._linalg_svd.default,
        aten.nonzero_static.default,
    }
)
#: Ops whose CPU kernels keep a channels-last order that their meta kernels lose.
KEEP_CHANNELS_LAST = frozenset(
    {
        aten.channel_shuffle.default,
        aten.max_unpool2d.default,
        aten.pixel_shuffle.default,
        aten.reflection_pad2d.default,
        aten.replication_pad2d.default,
    }
)


def infer(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Meta | None, ...]:
    """(shape, stride, dtype) of every output, flattened, in order; None for one that is not a tensor.

    Args:
        args: the op's arguments, with an object that has ``shape``, ``stride`` and ``dtype`` attributes for each tensor.

    Raises:
        DataDependent: only the values can tell.
        RuntimeError, IndexError, …: what torch raises for these shapes.
    """
    known = _KNOWN.get(id(op)) or _know(op)
    if known.depends or (known.is_index and _has_mask(args)):
        raise DataDependent(str(op))
    found = _infer(known, args, kwargs)
    at = known.output_mask
    if at is None:
        return found
    wanted = args[at] if at < len(args) else kwargs["output_mask"]
    return tuple([out if is_wanted else None for out, is_wanted in zip(found, wanted, strict=True)])


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What inferring needs to know of an op. ``output_mask``: the position of the argument by which a backward is told which gradients to
    make: meta kernels make the others too."""

    op: torch._ops.OpOverload
    depends: bool
    is_index: bool
    output_mask: int | None
    formula: Formula | None


#: By the op's id, for hashing an OpOverload runs Python.
_KNOWN: dict[int, _Known] = {}


def _know(op: torch._ops.OpOverload) -> _Known:
    names = [argument.name for argument in op._schema.arguments]
    mask = names.index("output_mask") if "output_mask" in names and not op._schema.is_mutable else None
    found = _KNOWN[id(op)] = _Known(op, op in DATA_DEPENDENT, op is aten.index.Tensor, mask, formula_of(op))
    return found


def _infer(known: _Known, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Meta | None, ...]:
    op, fast = known.op, known.formula
    refusal: Exception | None = None
    try:
        found = None if fast is None else fast(op, args, kwargs)
        if found is None:
            return by_meta(op, args, kwargs)
        if found is not REFUSED:
            return found
    except DataDependent:
        raise
    except Exception as error:
        refusal = error
    try:
        return _reworded(op, args, kwargs, refusal)  # out here, where its error is the only one that people see
    finally:
        refusal = None  # its traceback holds this frame, and so the callers' tensors


#: An illegal call is repeated with real tensors of up to this many elements; kernels check before they touch memory.
REPEATED = 1 << 24


def _reworded(
    op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception | None
) -> tuple[Meta | None, ...]:
    """Raise what torch's CPU kernel raises; if it does not, what it returns is the answer."""
    random = torch.Tag.nondeterministic_seeded in op.tags
    if not random and _elements(args) + _elements(tuple(kwargs.values())) <= REPEATED:
        try:
            return by_kernel(op, args, kwargs)
        except NotImplementedError as refusal:  # no CPU kernel: the workers may not be CPUs
            if error is not None and "not implemented for" in str(refusal):
                raise
    if error is not None:
        try:
            raise error
        finally:
            error = None
    return by_meta(op, args, kwargs)


def _elements(value: Any) -> int:
    if hasattr(value, "stride"):
        return math.prod(value.shape)
    return sum(map(_elements, value)) if type(value) in (list, tuple) else 0


def by_kernel(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Meta | None, ...]:
    """What torch's CPU kernel makes of tensors of these shapes."""
    try:
        return _run_on(0, op, args, kwargs)  # kernels look at indices and targets
    except RuntimeError as error:
        if "ZeroDivisionError" not in str(error):
            raise
    return _run_on(1, op, args, kwargs)  # and at integer divisors


def _run_on(
    number: int, op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Meta | None, ...]:
    """What ``op`` makes of tensors full of one number."""
    made = _rebuild(args, "cpu"), _rebuild_kwargs(kwargs, "cpu")
    for tensor in tree_leaves(made):
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(number)
    with torch.no_grad():
        return _flatten(op(*made[0], **made[1]))


def by_meta(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Meta | None, ...]:
    """What torch's meta kernels say, or its fake tensors where an op has none or one for CUDA."""
    if op in ASK_WHICH_DEVICE or (op is aten.convolution.default and any(map(is_channels_last, args[:2]))):
        return _by_fake(op, args, kwargs)
    if op in KEEP_CHANNELS_LAST and is_channels_last(args[0]):
        (found,) = _flatten(op(*_rebuild(args, "meta"), **_rebuild_kwargs(kwargs, "meta")))
        like = torch.empty(found[0], device="meta", memory_format=torch.channels_last)  # type: ignore[index]
        return ((*found[:1], like.stride(), *found[2:]),)  # type: ignore[index]
    try:
        with torch.no_grad():
            return _flatten(op(*_rebuild(args, "meta"), **_rebuild_kwargs(kwargs, "meta")))
    except NotImplementedError:
        pass
    except RuntimeError as error:
        # A composite that reads a value: torch says so in a plain RuntimeError (2.13, meta_local_scalar_dense).
        if "cannot be called on meta tensors" in str(error):
            raise DataDependent(str(op)) from error
        raise
    return _by_fake(op, args, kwargs)


def _by_fake(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Meta | None, ...]:
    # Importing it takes some tenths of a second (sympy), and few ops come here.
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedOperatorException,
    )

    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=False):
            return _flatten(op(*_rebuild(args, "cpu"), **_rebuild_kwargs(kwargs, "cpu")))
    except (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedOperatorException,
        NotImplementedError,
    ) as e:
        raise DataDependent(str(op)) from e


def _has_mask(args: Sequence[Any]) -> bool:
    """Indexing by a bool or byte mask: the size of the result is the number of true values. (Writing by a mask has known shapes.)"""
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def _rebuild(value: Any, device: str) -> Any:
    if hasattr(value, "stride"):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device)
    if type(value) in (list, tuple):
        return type(value)(_rebuild(v, device) for v in value)
    if type(value) is torch.device:
        return torch.device(device)
    return value


def _rebuild_kwargs(kwargs: Mapping[str, Any], device: str) -> dict[str, Any]:
    return {k: _rebuild(v, device) for k, v in kwargs.items()}


def _flatten(result: Any) -> tuple[Meta | None, ...]:
    if isinstance(result, torch.Tensor):
        if result.layout != torch.strided or result.is_nested or result.is_quantized:
            raise TypeError(
                "dtorch supports dense tensors only, and the result would be sparse, nested or quantised: call this on x.to_torch()"
            )
        return ((tuple(result.shape), result.stride(), result.dtype),)
    if isinstance(result, (list, tuple)):
        return tuple(meta for item in result for meta in _flatten(item))
    return (None,)
