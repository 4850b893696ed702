"""Calls that torch's own samples do not reach, or reach only with shapes that split evenly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dtorch.sharding import packing
from dtorch.sharding.rules import foreach as foreach_rules
from dtorch.sharding.rules import rule_for
from dtorch.sharding.strategy import RULES

from .ground_truth import Sample

aten = torch.ops.aten
LISTS = ((5, 3), (7,), (), (1, 4), (2, 2, 3))


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float32) * 0.8 + 0.1).to(dtype)


def signed(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def ints(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def call(op: Any, *args: Any, **kwargs: Any) -> Sample:
    return Sample(op, args, kwargs)


def by_schema(op: Any, dtype: torch.dtype = torch.float32) -> Sample:
    """Arguments guessed from the schema, for pointwise and list ops: all tensors of one shape."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only and kind.startswith("Optional"):
            continue
        value = _value(kind, dtype, argument.name)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(op, tuple(args), kwargs)


def _value(kind: str, dtype: torch.dtype, name: str) -> Any:
    integral = not dtype.is_floating_point
    if kind == "List[Tensor]":
        if name == "max_exp_avg_sqs":
            return []
        if name == "state_steps":
            return [torch.tensor(2.0) for _ in LISTS]
        return [ints(9, *s).add(1) if integral else f(*s) for s in LISTS]
    if kind == "Tensor" and name in ("other", "scalars", "lr") and not integral:
        return torch.tensor([0.5] * len(LISTS)) if name == "scalars" else torch.tensor(0.5)
    if kind == "Tensor":
        return ints(9, 5, 3).add(1) if integral else f(5, 3)
    if kind.startswith("List["):
        return [0.5] * len(LISTS)
    if kind == "str":
        return "none"
    if kind == "int":
        return 0
    if kind == "bool":
        return False
    return 2 if integral else 0.5


def pointwise_cases() -> Iterator[Sample]:
    for op in RULES:
        module = RULES[op].rule.__module__
        if module == foreach_rules.__name__ and op not in (aten._foreach_norm.Scalar, aten._foreach_powsum.Scalar):
            yield by_schema(op)
    for order in (0, 1, 2, 3.5, float("inf"), -float("inf")):
        yield call(aten._foreach_norm.Scalar, [signed(*s) for s in LISTS], order)
    yield call(aten._foreach_powsum.Scalar, [signed(*s) for s in LISTS], 2)
    for name in ("eq_", "ne_", "lt_", "le_", "gt_", "ge_", "floor_divide_", "copysign_"):
        for overload in ("Scalar", "Tensor"):
            yield by_schema(getattr(getattr(aten, name), overload))
    for op in (
        aten.addcdiv_.default, aten.addcmul_.default, aten.lerp_.Scalar, aten.gelu_.default, aten.hardswish_.default,
        aten.true_divide.Tensor, aten.positive.default, aten.contiguous.default, aten.copy.default, aten.fill.Scalar,
        aten.fill_.Scalar, aten.floor_divide.Scalar, aten.resolve_conj.default, aten.resolve_neg.default,
        aten.xlogy_.Scalar_Other, aten.logaddexp2.default, aten.special_i1.default, aten.sqrt_.default, aten.lift.default,
    ):  # fmt: skip
        yield by_schema(op)
    for op in (
        aten.gcd_.default,
        aten.lcm_.default,
        aten.__and__.Tensor,
        aten.__or__.Tensor,
        aten.__or__.Scalar,
        aten.__and__.Scalar,
    ):
        yield by_schema(op, torch.int64)
    yield call(aten.lerp.Tensor, f(5, 3), f(5, 3), f(3))
    yield call(aten.fill.Tensor, f(5, 3), torch.tensor(2.0))
    yield call(aten.fill_.Tensor, f(5, 3), torch.tensor(2.0))
    yield call(aten.heaviside_.default, signed(5, 3), f(5, 3))
    yield call(aten.masked_fill_.Tensor, f(5, 3), f(5, 1) > 0.5, torch.tensor(2.0))
    yield call(aten.masked_fill_.Scalar, f(5, 3), f(3) > 0.5, 2.0)
    for target in (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        yield call(aten._to_copy.default, signed(5, 3) * 4, dtype=target)
        yield call(aten.copy_.default, torch.zeros(5, 3, dtype=target), signed(5, 3) * 4)
    yield call(aten.mul.Tensor, signed(5, 3), f(5, 1) > 0.5)
    yield call(aten.add.Tensor, ints(9, 5, 3), ints(9, 3))
    yield call(aten.mul.Tensor, ints(9, 5, 3), f(3))
    yield call(aten.copy_.default, f(5, 3), f(3))
    yield call(aten.add_.Tensor, f(5, 3), f(5, 1), alpha=2)
    yield call(aten.mul_.Tensor, f(5, 3), f(3))
    yield call(aten.mul.Tensor, f(5, 3), 2.0)
    yield call(aten.add.Tensor, f(5, 3), 2.0)
    yield call(aten.bucketize.Tensor, f(5, 3), torch.linspace(0, 1, 7))
    yield call(aten.isin.Tensor_Tensor, ints(9, 5, 3), ints(9, 4))
    yield call(aten.log_sigmoid_forward.default, signed(5, 3))


def reduce_cases() -> Iterator[Sample]:
    x = signed(5, 3, 4)
    for op in (
        aten.median.dim, aten.nanmedian.dim, aten.mode.default, aten.max.dim, aten.min.dim, aten.argmax.default,
        aten.argmin.default, aten.all.dim, aten.any.dim, aten.prod.dim_int, aten.amax.default, aten.amin.default,
        aten.aminmax.default,
    ):  # fmt: skip
        named = {"dim": 1} if op is aten.aminmax.default else {}
        for dim, keepdim in ((0, False), (1, True), (-1, False)):
            args = () if named else ([dim] if op in (aten.amax.default, aten.amin.default) else dim, keepdim)
            yield call(op, x.clone(), *args, **named)
    for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default):
        for dims, keepdim in (([0, 2], False), ([1], True), ([0, 1, 2], False), ([-1, 0], True)):
            yield call(op, x.clone(), dims, keepdim)
    for op in (aten.all.dims, aten.any.dims):
        for dims in ([0, 2], [1], None, []):
            yield call(op, x > 1, dims, True)
            yield call(op, x > 1, dims, False)
    for dims in ([0, 2], [1], [0, 1, 2]):
        yield call(aten.count_nonzero.dim_IntList, ints(2, 5, 3, 4), dims)
        yield call(aten.nansum.default, torch.where(x > 1, torch.nan, x), dims)
        yield call(aten.var_mean.correction, x.clone(), dims, correction=1, keepdim=True)
        yield call(aten.std.correction, x.clone(), dims)
    for op in (aten.sum.default, aten.mean.default, aten.max.default, aten.min.default, aten.all.default, aten.any.default,
               aten.prod.default, aten.count_nonzero.default, aten.argmax.default):  # fmt: skip
        yield call(op, x.clone())
        yield call(op, signed(1))
    for op in (aten.max.default, aten.min.default, aten.sum.default, aten.prod.default):
        yield call(op, ints(9, 5, 3))
    yield call(aten.max.default, torch.tensor([1.0, torch.nan, 3.0, 0.0]))
    yield call(aten.sum.default, x > 0)
    yield call(aten.mean.dim, x.to(torch.bfloat16), [0, 1])
    yield call(aten.sum.dim_IntList, x.to(torch.bfloat16), [0], dtype=torch.float32)
    for order in (2, 1, 0, 3.5, float("inf"), -float("inf"), -1):
        yield call(aten.linalg_vector_norm.default, x.clone(), order)
        yield call(aten.linalg_vector_norm.default, x.clone(), order, [0, 2], True)
        yield call(aten.norm.Scalar, x.clone(), order)
        yield call(aten.norm.ScalarOpt_dim, x.clone(), order, [0], False)
        yield call(aten.norm.ScalarOpt_dtype, x.clone(), order, dtype=torch.float64)
        yield call(aten.norm.ScalarOpt_dim_dtype, x.clone(), order, [1], True, dtype=torch.float64)
    yield call(aten.linalg_vector_norm.default, x.to(torch.bfloat16), 2)
    yield call(aten.linalg_vector_norm.default, x.to(torch.float16), 2)
    yield call(aten.linalg_vector_norm.default, x.clone(), 2, None, False, dtype=torch.float64)


def matmul_cases() -> Iterator[Sample]:
    yield call(aten.addmm.default, f(3), f(5, 7), f(7, 3))
    yield call(aten.addmm.default, f(5, 1), f(5, 1), f(1, 3), beta=0.5, alpha=2)
    yield call(aten.addmm_.default, f(5, 3), f(5, 7), f(7, 3))
    yield call(aten.addmv_.default, f(5), f(5, 7), f(7))
    yield call(aten.addr_.default, f(5, 3), f(5), f(3))
    yield call(aten.addbmm_.default, f(5, 3), f(4, 5, 2), f(4, 2, 3))
    yield call(aten.baddbmm_.default, f(4, 5, 3), f(4, 5, 2), f(4, 2, 3))
    yield call(aten.mm.default, ints(9, 5, 3), ints(9, 3, 2))
    yield call(aten.linear.default, f(5, 3), f(7, 3))
    yield call(aten.linear.default, f(2, 5, 3), f(7, 3), f(7))
    yield call(aten.matmul.default, f(2, 5, 3), f(3, 7))
    yield call(aten.matmul.default, f(5, 3), f(2, 3, 7))
    yield call(aten.matmul.default, f(4, 1, 5, 3), f(2, 3, 7))
    ends = torch.tensor([3, 5], dtype=torch.int32)
    yield call(aten._grouped_mm.default, f(5, 16), f(2, 16, 24), ends)
    yield call(aten._grouped_mm.default, f(5, 16).t(), f(5, 24), ends)
    yield call(aten._grouped_mm.default, f(2, 16, 24), f(5, 24).t(), ends)
    yield call(aten._grouped_mm.default, f(2, 8, 16), f(2, 16, 24))
    yield call(aten.tensordot.default, f(4, 5, 3), f(4, 5, 2), [0, 1], [0, 1])
    yield call(aten.tensordot.default, f(4, 5, 3), f(3, 6, 5), [-2, 2], [2, 0])
    yield call(aten.tensordot.default, f(4, 1, 3), f(5, 3), [1, 2], [0, 1])
    yield call(aten.tensordot.default, f(4), f(3), [], [])


def view_cases() -> Iterator[Sample]:
    for shape, out in (
        ((6, 4), (3, 8)), ((6, 4), (24,)), ((24,), (6, 4)), ((5, 3), (15,)), ((15,), (5, 3)), ((1, 6, 4), (6, 2, 2)),
        ((2, 3, 1, 4), (2, 12)), ((4, 1, 6), (1, 4, 6)), ((1, 1), (1,)), ((5, 6), (5, 2, 3)), ((0, 3), (0, 3)),
        ((5, 0), (0,)), ((2, 3, 4), (2, -1)), ((3,), (1, 3, 1)), ((), (1,)), ((1,), ()), ((8, 6), (4, 2, 2, 3)),
    ):  # fmt: skip
        for op in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            yield call(op, f(*shape), list(out))
    yield call(aten._reshape_alias.default, f(6, 4), [24], [1])
    yield call(aten._reshape_alias.default, f(6, 4), [6, 2, 2], [4, 2, 1])
    yield call(aten.view.dtype, f(5, 3), torch.int32)
    yield call(aten.view.dtype, f(5, 4), torch.int16)
    yield call(aten.numpy_T.default, f(5, 3))
    yield call(aten._neg_view.default, f(5, 3))
    yield call(aten.chunk.default, f(5, 3), 2, 1)
    yield call(aten.unsafe_chunk.default, f(5, 3), 2, 1)
    yield call(aten.narrow.default, f(5, 3), 1, 1, 2)
    yield call(aten.unsafe_split_with_sizes.default, f(5, 3), [1, 2], 1)
    yield call(aten.repeat_interleave.self_int, f(5, 3), 2, 1)
    yield call(aten.triu_.default, f(3, 4, 4))
    for shape in ((1, 2, 1, 3), (2, 1), (1, 1), (3, 2)):
        yield call(aten.squeeze.default, f(*shape))
        yield call(aten.squeeze.dim, f(*shape), 0)
        yield call(aten.squeeze.dim, f(*shape), -1)
        yield call(aten.squeeze.dims, f(*shape), [0, 1])
    yield call(aten.slice.Tensor, f(5, 3), 0, 0, 9223372036854775807)
    yield call(aten.slice.Tensor, f(5, 3), 0, 1, 4)
    yield call(aten.slice.Tensor, f(5, 3), -1, 0, 3)
    yield call(aten.expand.default, f(5, 1), [2, -1, 4])
    yield call(aten.expand.default, f(5, 3), [5, 3])
    yield call(aten.slice_backward.default, f(2, 3), [5, 3], 0, 1, 3, 1)
    yield call(aten.slice_backward.default, f(5, 3), [5, 3], 0, 0, 9223372036854775807, 1)
    yield call(aten.select_backward.default, f(5, 3), [5, 4, 3], 1, 2)
    yield call(aten.permute.default, f(5, 3, 4), [2, -3, 1])
    yield call(aten.roll.default, f(5, 3), [1], [])
    yield call(aten.roll.default, f(5, 3), [1], [1])


def nn_cases() -> Iterator[Sample]:
    for name in ("native_layer_norm", "layer_norm"):
        yield call(getattr(aten, name).default, signed(5, 3, 4), [4], f(4), f(4), 1e-5)
    yield call(aten.native_layer_norm.default, signed(5, 3, 4), [3, 4], None, None, 1e-5)
    out = aten.native_layer_norm(signed(5, 3, 4), [4], None, None, 1e-5)
    yield call(
        aten.native_layer_norm_backward.default, signed(5, 3, 4), signed(5, 3, 4), [4], *out[1:], f(4), f(4), [True] * 3
    )
    yield call(aten.rms_norm.default, signed(5, 3, 4), [4], f(4))
    x = signed(5, 3, 4)
    yield call(aten._fused_rms_norm.default, x, [4], f(4), 1e-5)
    yield call(aten._native_batch_norm_legit.no_stats, signed(5, 3, 4), f(3), f(3), True, 0.1, 1e-5)
    for training in (True, False):
        rest = (f(3), f(3), f(3), f(3), training, 0.1, 1e-5)
        yield call(aten._native_batch_norm_legit_functional.default, signed(5, 3, 4), *rest)
        yield call(aten._native_batch_norm_legit.default, signed(5, 3, 4), *rest)
        yield call(aten.native_batch_norm.default, signed(5, 3), *rest)
        saved = aten.native_batch_norm(x, f(3), f(3), f(3), f(3), training, 0.1, 1e-5)[1:]
        args = (signed(5, 3, 4), x, f(3), f(3), f(3), *saved, training, 1e-5, [True] * 3)
        yield call(aten.native_batch_norm_backward.default, *args)
    for group in (1, 2, 4):
        x = signed(5, 4, 6)
        outs = aten.native_group_norm(x, f(4), f(4), 5, 4, 6, group, 1e-5)
        yield call(aten.native_group_norm.default, x, f(4), f(4), 5, 4, 6, group, 1e-5)
        rest = (*outs[1:], f(4), 5, 4, 6, group, [True] * 3)
        yield call(aten.native_group_norm_backward.default, signed(5, 4, 6), x, *rest)
    for groups, transposed in ((1, False), (1, True), (2, False), (6, False), (2, True)):
        x = signed(5, 6, 7, 7)
        w = signed(6, 6 // groups, 3, 3)
        rest = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
        yield call(aten.convolution.default, x, w, f(6), *rest)
        yield call(aten.convolution.default, x, w, None, *rest)
        grad = signed(*aten.convolution(x, w, None, *rest).shape)
        yield call(aten.convolution_backward.default, grad, x, w, [6], *rest, [True] * 3)
        yield call(aten.convolution_backward.default, grad, x, w, None, *rest, [True, True, False])
    yield call(aten.convolution.default, signed(5, 3, 7), signed(5, 3, 3), f(5), [2], [1], [1], False, [0], 1)
    yield from _attention_cases()
    for name in ("upsample_nearest3d", "_upsample_nearest_exact3d"):
        yield call(getattr(aten, name).default, f(3, 2, 2, 2, 2), [4, 4, 4])
        yield call(getattr(aten, name + "_backward").default, f(3, 2, 4, 4, 4), [4, 4, 4], [3, 2, 2, 2, 2])
    for name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        yield call(getattr(aten, name).default, f(3, 2, 2, 2), [4, 4])
        yield call(getattr(aten, name + "_backward").default, f(3, 2, 4, 4), [4, 4], [3, 2, 2, 2])
    for name in ("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"):
        yield call(getattr(aten, name).default, f(3, 2, 4, 4), [6, 6], False)
        yield call(getattr(aten, name + "_backward").default, f(3, 2, 6, 6), [6, 6], [3, 2, 4, 4], False)
    for name, size in (("reflection_pad2d", 2), ("reflection_pad3d", 3), ("replication_pad3d", 3)):
        x, pad = f(3, 2, *[4] * size), [1] * (2 * size)
        yield call(getattr(aten, name).default, x, pad)
        yield call(getattr(aten, name + "_backward").default, f(3, 2, *[6] * size), x, pad)
    yield call(aten.adaptive_avg_pool1d.default, f(5, 3, 8), [4])
    yield call(aten.avg_pool1d.default, f(5, 3, 8), [2])


def _attention_cases() -> Iterator[Sample]:
    op, backward = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    for heads, causal, mask in (
        (4, False, None), (4, True, None), (4, False, (3, 4, 5, 5)), (4, False, (5, 5)), (4, False, (3, 1, 1, 5)), (2, False, None),
    ):  # fmt: skip
        q, k, v = signed(3, 4, 5, 8), signed(3, heads, 5, 8), signed(3, heads, 5, 8)
        named = {} if mask is None else {"attn_mask": signed(*mask)}
        yield call(op.default, q, k, v, 0.0, causal, **named)
        try:
            out, lse = op(q, k, v, 0.0, causal, **named)
        except RuntimeError:
            continue  # this build has no grouped heads
        yield call(backward.default, signed(*out.shape), q, k, v, out, lse, 0.0, causal, **named)


def loss_cases() -> Iterator[Sample]:
    pairs = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
    for reduction in (0, 1, 2):
        for name in pairs:
            forward, backward = getattr(aten, name).default, getattr(aten, name + "_backward").default
            extra = {"smooth_l1_loss": (1.0,), "huber_loss": (1.0,)}.get(name, ())
            weight = {"binary_cross_entropy": (f(5, 3),)}.get(name, ())
            yield call(forward, f(5, 3), f(5, 3), *weight, reduction, *extra)
            grad = f(5, 3) if reduction == 0 else torch.tensor(0.7)
            yield call(backward, grad, f(5, 3), f(5, 3), *weight, reduction, *extra)
        yield call(aten.binary_cross_entropy_with_logits.default, signed(5, 3), f(5, 3), f(3), f(3), reduction)
        yield call(aten.mse_loss.default, f(5, 3, dtype=torch.bfloat16), f(5, 3, dtype=torch.bfloat16), reduction)
        for shape, target in (((5, 3), (5,)), ((5, 3, 2, 7), (5, 2, 7)), ((1, 3), (1,))):
            name = "nll_loss" if len(shape) == 2 else "nll_loss2d"
            x, t = signed(*shape).log_softmax(1), ints(3, *target)
            t.view(-1)[0] = 2
            for weight in (None, f(3)):
                args = (x, t, weight, reduction, 1)
                yield call(getattr(aten, name + "_forward").default, *args)
                total = getattr(aten, name + "_forward")(*args)[1]
                grad = f(*target) if reduction == 0 else torch.tensor(0.7)
                yield call(getattr(aten, name + "_backward").default, grad, *args, total)
    yield call(aten.mse_loss.default, f(5, 3), f(5, 3))
    yield call(aten.nll_loss_forward.default, signed(5, 3), torch.full((5,), 1), None, 1, 1)


def indexing_cases() -> Iterator[Sample]:
    x = signed(5, 3, 4)
    i, j = ints(3, 2), ints(4, 2)
    for indices in ([ints(5, 7)], [None, i], [None, None, j], [ints(5, 2), None, j], [None, i, j], [ints(5, 3, 2), ints(3, 2)],
                    [ints(5, 1), i, j], [None, ints(3, 3, 1), ints(4, 5)]):  # fmt: skip
        for op in (aten.index.Tensor, aten._unsafe_index.Tensor):
            yield call(op, x.clone(), indices)
        out = aten.index(x, indices)
        unique = [None if t is None else torch.arange(t.numel()).reshape(t.shape) % 3 for t in indices]
        for op in (
            aten.index_put.default,
            aten.index_put_.default,
            aten._index_put_impl_.default,
            aten._unsafe_index_put.default,
        ):
            yield call(op, x.clone(), indices, signed(*out.shape), True)
            yield call(op, x.clone(), indices, torch.tensor(2.0), False)
            yield call(op, x.clone(), unique, signed(*out.shape[-1:]), True)
    for mask in (signed(5, 3, 4) > 0, signed(5, 3) > 0, signed(5) > 0):
        yield call(aten.index_put_.default, x.clone(), [mask], torch.tensor(2.0))
        yield call(aten.index_put_.default, x.clone(), [mask], torch.tensor(2.0), True)
    yield call(aten.index_put_.default, x.clone(), [None, signed(3, 4) > 0], torch.tensor(2.0))
    index = ints(3, 5, 3, 4)
    for dim in (0, 1, 2):
        yield call(aten.gather.default, x.clone(), dim, ints(3, 5, 2, 4))
        for op in (aten.scatter_add.default, aten.scatter_add_.default):
            yield call(op, x.clone(), dim, index, signed(5, 3, 4))
            yield call(op, x.clone(), dim, index[:, :2], signed(5, 3, 4))
        for op in (aten.scatter_reduce.two, aten.scatter_reduce_.two):
            yield call(op, x.clone(), dim, index, signed(5, 3, 4), "mean")
        for op in (aten.scatter_.src, aten.scatter.src):
            yield call(op, x.clone(), dim, index, signed(5, 3, 4))
        yield call(aten.scatter.value, x.clone(), dim, index, 2.0)
        yield call(aten.scatter_.value_reduce, x.clone(), dim, index, 2.0, reduce="multiply")
        yield call(aten.scatter.value_reduce, x.clone(), dim, index, 2.0, reduce="add")
        yield call(aten.scatter_.reduce, x.clone(), dim, index, signed(5, 3, 4), reduce="add")
        size = x.shape[dim]
        picked, source = torch.randperm(size)[:2], x.index_select(dim, torch.tensor([0, 1])).clone()
        yield call(aten.index_select.default, x.clone(), dim, ints(size, 7))
        for op in (aten.index_add.default, aten.index_add_.default, aten.index_copy.default, aten.index_copy_.default):
            yield call(op, x.clone(), dim, picked, source)
        yield call(aten.index_add.default, x.clone(), dim, picked, source, alpha=2)
        for op in (aten.index_reduce.default, aten.index_reduce_.default):
            yield call(op, x.clone(), dim, picked, source, "mean")
        for op in (aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar):
            yield call(op, x.clone(), dim, picked, 2.0)
        for op in (aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor):
            yield call(op, x.clone(), dim, picked, torch.tensor(2.0))
        for op in (aten.cumsum_.default, aten.cumprod_.default, aten.argsort.default):
            yield call(op, x.clone(), dim)
        yield call(aten.argsort.stable, x.clone(), stable=True, dim=dim)
        yield call(aten.renorm_.default, x.clone(), 2, dim, 1.0)
        yield call(aten.cat.default, [signed(5, 3, 4), signed(5, 3, 4)], dim)
        yield call(aten.stack.default, [signed(5, 3, 4), signed(5, 3, 4)], dim)
    yield call(aten.slice_scatter.default, x.clone(), signed(2, 3, 4), 0, 1, 3)
    yield call(packing.JOIN, [signed(4, 3), signed(4, 3)], 0)
    yield call(packing.JOIN, [signed(2, 12)] * 3, 1)
    yield call(aten.cat.default, [torch.empty(0), signed(5, 3)], 1)
    yield call(aten.cat.default, [signed(5, 0, 4), signed(5, 3, 4), signed(5, 0, 4)], 1)
    yield call(aten.cat.default, [signed(5, 3), ints(3, 5, 2)], -1)
    yield call(aten.embedding.default, signed(7, 3), ints(7, 5, 2))
    yield call(aten.embedding.default, signed(1, 3), ints(1, 5))
    yield call(aten.embedding_dense_backward.default, signed(5, 2, 3), ints(7, 5, 2), 7, 1, False)
    yield call(aten.embedding_dense_backward.default, signed(5, 2, 3), ints(7, 5, 2), 7, -1, True)
    yield call(aten.constant_pad_nd.default, signed(5, 3, 4), [1, 2, 0, 0], 3.0)
    yield call(aten.searchsorted.Tensor, f(5, 3).sort().values, f(5, 2))
    yield call(aten.searchsorted.Tensor, f(7).sort().values, f(5, 2))
    yield call(aten.take.default, x.clone(), ints(60, 5, 2))


def factory_cases() -> Iterator[Sample]:
    for op in (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default):
        yield call(op, f(5, 3))
        yield call(op, f(5, 3), dtype=torch.int64)
    yield call(aten.full_like.default, f(5, 3), 2.0)
    for size in ([5, 3], [2], []):
        yield call(aten.new_zeros.default, f(5, 3), size)
        yield call(aten.new_full.default, f(5, 3), size, 2.0)
        yield call(aten.new_empty.default, f(5, 3), size)
    yield call(aten.new_empty_strided.default, f(5, 3), [5, 3], [1, 5])
    yield call(aten.new_empty_strided.default, f(5, 3), [2], [1])


def all_cases() -> list[Sample]:
    torch.manual_seed(0)
    rule_for(aten.add.Tensor)
    families = (
        pointwise_cases, reduce_cases, matmul_cases, view_cases, nn_cases, loss_cases, indexing_cases, factory_cases,
    )  # fmt: skip
    return [sample for family in families for sample in family()]
