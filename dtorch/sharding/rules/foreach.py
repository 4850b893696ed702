"""List ops: each index of the lists is an op of its own, placed without regard to the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...placement import PARTIAL, REPLICATE, partial, shard
from ..strategy import Call, Group, Strategy, TensorArg, enlarges, rule
from .pointwise import broadcast
from .reduce import norm_parts

aten = torch.ops.aten
R, P = REPLICATE, PARTIAL


def _overloads(*names: str) -> list[torch._ops.OpOverload]:
    """The functional and in-place overloads of ``_foreach_<name>``, as many as there are."""
    found = []
    for name in names:
        for packet in (getattr(aten, f"_foreach_{name}", None), getattr(aten, f"_foreach_{name}_", None)):
            if packet is not None:
                found += [getattr(packet, o) for o in packet.overloads() if o != "out" and not o.endswith("_out")]
    return found


def _lists(call: Call) -> list[list[TensorArg]]:
    """The tensor lists of the call, the written or first one first; empty ones left out."""
    return [list(a) for a in call.args if type(a) in (list, tuple) and a and type(a[0]) is TensorArg]


def pointwise(
    *pending: int, scale: str = "", shrinks: Callable[[Any], bool] = lambda number: not enlarges(number)
) -> Callable[[Call], list[Group]]:
    """A pointwise list op; ``pending`` says which of a group's tensors may be pending sums together.

    ``scale`` names an argument, a number or one for each group, that the addends are scaled by; they stay pending if it ``shrinks``.
    """

    def of(call: Call) -> list[Group]:
        lists = _lists(call)
        # An in-place op returns nothing, which reads as no output or as one that is no tensor.
        functional = any(o is not None for o in call.outputs)
        groups = []
        for i, first in enumerate(lists[0]):
            members = [tensors[i] for tensors in lists]
            out = call.outputs[i] if functional else first
            assert out is not None
            strategies = []
            for d in range(len(out.shape)):
                placed = tuple([broadcast(t, d, out.shape) for t in members])
                strategies.append(Strategy(placed, (shard(d),) if functional else ()))
            if (
                pending
                and all(_passes(members[k].dtype, out.dtype) for k in pending)
                and _shrinks(call, scale, i, shrinks)
            ):
                placed = tuple([P if k in pending else R for k in range(len(members))])
                strategies.append(Strategy(placed, (P,) if functional else ()))
            outputs = (i,) if functional else ()
            groups.append(Group(tuple([t.index for t in members]), outputs, tuple(strategies)))
        return groups

    return of


def _shrinks(call: Call, scale: str, i: int, shrinks: Callable[[Any], bool]) -> bool:
    number = call.get(scale) if scale else 0
    return shrinks(number[i] if isinstance(number, (list, tuple)) else number)


def _passes(own: torch.dtype, out: torch.dtype) -> bool:
    return own == out and own != torch.bool


rule(
    *_overloads(
        "abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "erfc", "exp", "expm1", "floor", "frac", "lgamma",
        "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt",
        "tan", "tanh", "trunc", "pow", "maximum", "minimum", "clamp_max", "clamp_min",
    )
)(pointwise())  # fmt: skip
rule(*_overloads("neg", "zero", "clone"))(pointwise(0))
rule(*_overloads("copy"))(pointwise(0, 1))
rule(*_overloads("addcmul", "addcdiv"))(pointwise())

_add, _sub, _mul, _div = aten._foreach_add, aten._foreach_sub, aten._foreach_mul, aten._foreach_div
_add_, _sub_, _mul_, _div_ = aten._foreach_add_, aten._foreach_sub_, aten._foreach_mul_, aten._foreach_div_
_lerp, _lerp_ = aten._foreach_lerp, aten._foreach_lerp_
rule(_add.List, _add_.List, _sub.List, _sub_.List)(pointwise(0, 1, scale="alpha"))
rule(_lerp.Scalar, _lerp_.Scalar)(pointwise(0, 1, scale="weight"))
rule(_lerp.ScalarList, _lerp_.ScalarList)(pointwise(0, 1, scale="weight"))
rule(_mul.Scalar, _mul_.Scalar)(pointwise(0, scale="scalar"))
rule(_mul.ScalarList, _mul_.ScalarList)(pointwise(0, scale="scalars"))
rule(_div.Scalar, _div_.Scalar)(pointwise(0, scale="scalar", shrinks=enlarges))
rule(_div.ScalarList, _div_.ScalarList)(pointwise(0, scale="scalars", shrinks=enlarges))
rule(
    *(getattr(packet, o) for packet in (_mul, _mul_, _div, _div_) for o in ("List", "Tensor")),
    _lerp.List,
    _lerp_.List,
)(pointwise())
# A number is added once, not once a device: sums do not pass.
rule(
    *(getattr(packet, o) for packet in (_add, _add_, _sub, _sub_) for o in ("Scalar", "ScalarList")),
    _add.Tensor,
    _add_.Tensor,
)(pointwise())

rule(
    *(
        getattr(packet, o)
        for packet in (
            aten._fused_adam_,
            aten._fused_adamw_,
            aten._fused_sgd_,
            aten._fused_adagrad_,
        )
        for o in ("default", "tensor_lr")
    )
)(pointwise())


@rule(aten._foreach_norm.Scalar, aten._foreach_powsum.Scalar)
def norm(call: Call) -> list[Group]:
    """One number a tensor; the order decides what is pending (`STATIC_NUMBERS`)."""
    pending, local, finish = norm_parts(call.get("ord"), "foreach_")
    if call.op is aten._foreach_powsum.Scalar:
        pending, local, finish = "sum", None, None
    return [_reduced(call, t, pending, local, finish) for t in call.inputs]


def _reduced(call: Call, t: TensorArg, pending: str, local: str | None, finish: str | None) -> Group:
    out = call.outputs[t.index]
    assert out is not None
    strategies: tuple[Strategy, ...] = ()
    # The pending sum of squares of a half would overflow.
    if out.dtype != torch.float16 and math.prod(t.shape):
        placed = (partial(pending),)
        strategies = tuple([Strategy((shard(d),), placed, local=local, finish=finish) for d in range(t.ndim)])
    return Group((t.index,), (t.index,), strategies)


STATIC_NUMBERS: dict[torch._ops.OpOverload, frozenset[str]] = {
    aten._foreach_norm.Scalar: frozenset({"ord"}),
    aten._foreach_powsum.Scalar: frozenset({"ord"}),
}
