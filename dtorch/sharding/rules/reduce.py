"""Reductions: kept dims stay sharded; over a sharded dim each device reduces its part and the results are pending."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ...placement import PARTIAL, Placement, partial, shard
from ..strategy import Call, Strategy, rule, schema_arguments
from .pointwise import keeps_sums

aten = torch.ops.aten


def reduced_dims(ndim: int, dims: int | Sequence[int] | None) -> list[int]:
    """The dims a reduction goes over; none given means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(ndim))
    if not ndim:
        return []
    return [d % ndim for d in ([dims] if isinstance(dims, int) else dims)]


def _argument(call: Call, name: str) -> object:
    return call.get(name) if any(name == own for own, _, _ in schema_arguments(call.op)) else None


def reduction(
    call: Call,
    pending: Placement | None,
    *,
    local: str | None = None,
    finish: str | None = None,
    dims: list[int] | None = None,
) -> list[Strategy]:
    """Kept dims shard; reduced dims give ``pending`` if that is not None, through ``local`` and ``finish``."""
    shape = call.inputs[0].shape
    ndim = len(shape)
    gone = set(reduced_dims(ndim, _argument(call, "dim")) if dims is None else dims)  # type: ignore[arg-type]
    keepdim = bool(_argument(call, "keepdim"))
    kept = [d for d in range(ndim) if d not in gone]
    expected = tuple([1 if d in gone else shape[d] for d in range(ndim)] if keepdim else [shape[d] for d in kept])
    if any(o is not None and o.shape != expected for o in call.outputs):
        return []  # an op that reads its dims in another way
    count = len(call.outputs)
    found = [Strategy((shard(d),), (shard(d if keepdim else o),) * count) for o, d in enumerate(kept)]
    if pending is not None:
        found += [Strategy((shard(d),), (pending,) * count, local=local, finish=finish) for d in sorted(gone)]
    return found


@rule(aten.sum.default, aten.sum.dim_IntList, by_form=True)
def sum_(call: Call) -> list[Strategy]:
    found = reduction(call, PARTIAL)
    if keeps_sums(call, (0,)):
        found.append(Strategy((PARTIAL,), (PARTIAL,)))
    return found


@rule(aten.nansum.default, by_form=True)
def nansum(call: Call) -> list[Strategy]:
    return reduction(call, PARTIAL)


@rule(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, by_form=True)
def count_nonzero(call: Call) -> list[Strategy]:
    return reduction(call, PARTIAL)


@rule(aten.mean.default, aten.mean.dim, by_form=True)
def mean(call: Call) -> list[Strategy]:
    """Parts differ in size, so each device divides its sum by the count of the whole."""
    found = reduction(call, PARTIAL, local="dtorch.mean")
    if keeps_sums(call, (0,)):
        found.append(Strategy((PARTIAL,), (PARTIAL,)))
    return found


@rule(aten.amax.default, aten.max.default, by_form=True)
def amax(call: Call) -> list[Strategy]:
    return reduction(call, _ordered(call, "max"), local="dtorch.amax")


@rule(aten.amin.default, aten.min.default, by_form=True)
def amin(call: Call) -> list[Strategy]:
    return reduction(call, _ordered(call, "min"), local="dtorch.amin")


def _ordered(call: Call, which: str) -> Placement | None:
    """The pending maximum or minimum; bools have none, and over nothing at all torch raises."""
    return None if call.inputs[0].dtype == torch.bool or 0 in call.inputs[0].shape else partial(which)


@rule(aten.all.default, aten.all.dim, aten.all.dims, by_form=True)
def all_(call: Call) -> list[Strategy]:
    return reduction(call, partial("and") if call.outputs[0].dtype == torch.bool else None)  # type: ignore[union-attr]


@rule(aten.any.default, aten.any.dim, aten.any.dims, by_form=True)
def any_(call: Call) -> list[Strategy]:
    return reduction(call, partial("or") if call.outputs[0].dtype == torch.bool else None)  # type: ignore[union-attr]


@rule(aten.prod.default, aten.prod.dim_int, by_form=True)
def prod(call: Call) -> list[Strategy]:
    """Products of floats in another order overflow elsewhere: 1e30 * 1e-30 * 1e30 is not 1e30 * 1e30 * 1e-30."""
    exact = not (call.outputs[0].dtype.is_floating_point or call.outputs[0].dtype.is_complex)  # type: ignore[union-attr]
    return reduction(call, partial("product") if exact else None)


@rule(
    aten.max.dim,
    aten.min.dim,
    aten.logsumexp.default,
    aten.aminmax.default,
    aten.median.dim,
    aten.nanmedian.dim,
    aten.mode.default,
    aten.kthvalue.default,
    by_form=True,
)
def kept_only(call: Call) -> list[Strategy]:
    """Over a sharded dim these need more than one number of each device, or its position."""
    return reduction(call, None)


@rule(aten.argmax.default, aten.argmin.default, by_form=True)
def argmax(call: Call) -> list[Strategy]:
    return reduction(call, None)


@rule(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, by_shards=True)
def variance(call: Call) -> list[Strategy]:
    """Sums of squares would cancel, so not over a sharded dim; and an empty part would print a warning about its degrees of freedom."""
    return [dataclasses.replace(s, nonempty=True) for s in reduction(call, None)]


def norm_parts(order: float | None, prefix: str = "") -> tuple[str, str, str | None]:
    """(pending reduction, local, finish) of a norm. The order is thus part of the plan (`STATIC_NUMBERS`)."""
    order = 2.0 if order is None else float(order)
    local = f"dtorch.{prefix}norm_part"
    if math.isinf(order):
        return ("max" if order > 0 else "min"), local, None
    return "sum", local, None if order == 0 else f"dtorch.{prefix}norm_root"


@rule(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dtype,
    aten.norm.ScalarOpt_dim_dtype,
    by_form=True,
)
def norm(call: Call) -> list[Strategy]:
    name = "ord" if call.op is aten.linalg_vector_norm.default else "p"
    order = call.get(name)
    out = call.outputs[0].dtype  # type: ignore[union-attr]
    # The pending sum of squares of a half would overflow.
    if out == torch.float16 or out.is_complex or 0 in call.inputs[0].shape:
        return reduction(call, None)
    pending, local, finish = norm_parts(order)
    return reduction(call, partial(pending), local=local, finish=finish)


#: Numbers whose value decides placements, so that a plan must not be shared between different ones.
STATIC_NUMBERS: dict[object, frozenset[str]] = {
    aten.linalg_vector_norm.default: frozenset({"ord"}),
    aten.norm.Scalar: frozenset({"p"}),
    aten.norm.ScalarOpt_dim: frozenset({"p"}),
    aten.norm.ScalarOpt_dtype: frozenset({"p"}),
    aten.norm.ScalarOpt_dim_dtype: frozenset({"p"}),
}
