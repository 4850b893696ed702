"""Infinite, undefined, huge and tiny values, in the tensors and as the numbers of samples.

A pending sum is where they hurt: 2 - 1 times inf is inf, but addend by addend it is inf - inf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from dtorch.placement import is_partial
from dtorch.sharding.strategy import Strategy

from .cases import LISTS, call, f, signed
from .ground_truth import Sample, inputs_of, tree

aten = torch.ops.aten

HUGE = {torch.float16: 1e3, torch.float64: 1e250}
"""Its square overflows, a sum of a few dozen does not; 1e25 for other types."""

CRASHES = {
    aten.grid_sampler_2d.default: 1,
    aten.grid_sampler_3d.default: 1,
    aten.grid_sampler_2d_backward.default: 2,
    aten.grid_sampler_3d_backward.default: 2,
}
"""Ops of torch 2.13 that end the process, with the tensor that must not be infinite: it says where in memory to look."""

NUMBERS = (math.inf, -math.inf, math.nan, 0.0, -0.0, 1e25, 1e-25, 1.0, -1.0, 3.0)


def matters(strategy: Strategy) -> bool:
    """Whether devices do something else than the op on their own elements."""
    placements = (*strategy.inputs, *strategy.outputs)
    return bool(strategy.local or strategy.finish) or any(p is not None and is_partial(p) for p in placements)


def salted(sample: Sample) -> Iterator[Sample]:
    """``sample`` with special values in one real tensor after another, then in all of them at once.

    Not with huge ones in two at once: whether an overflowing product of theirs meets an infinity as inf or, in a fused
    multiply-add, as a large number depends on the kernel.
    """
    real = [i for i, t in enumerate(inputs_of(sample)) if t.dtype.is_floating_point and t.dtype.itemsize > 1]
    real = [i for i in real if i != CRASHES.get(sample.op)]
    for chosen in [[i] for i in real[:4]] + ([real] if len(real) > 1 else []):
        yield _salted(sample, chosen)


def _salted(sample: Sample, chosen: list[int]) -> Sample:
    generator = torch.Generator().manual_seed(sum(chosen))
    index = -1

    def salt(t: torch.Tensor) -> torch.Tensor:
        nonlocal index
        index += 1
        if index not in chosen:
            return t
        huge = HUGE.get(t.dtype, 1e25)
        values = [math.inf, -math.inf, math.nan, 1 / huge, 0.0, -0.0, *([huge, -huge] if len(chosen) == 1 else [])]
        kind = torch.randint(0, len(values) * 4, t.shape, generator=generator)  # three quarters stay
        salted = t.clone()
        for k, value in enumerate(values):
            salted[kind == k] = value
        return salted

    args, kwargs = tree(sample.args, salt), tree(sample.kwargs, salt)
    return dataclasses.replace(sample, args=args, kwargs=kwargs, special=True)


def numbered() -> Iterator[Sample]:
    """Every op that scales by a number, with each of `NUMBERS`."""
    for number in NUMBERS:
        for sample in _numbered(number):
            yield dataclasses.replace(sample, special=True)


def _numbered(number: float) -> Iterator[Sample]:
    for op in (aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar):
        yield call(op, signed(5, 3), number)
    for op in (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor):
        yield call(op, signed(5, 3), signed(5, 3), alpha=number)
    for op in (aten.lerp.Scalar, aten.lerp_.Scalar):
        yield call(op, signed(5, 3), signed(5, 3), number)
    yield call(aten.leaky_relu_backward.default, signed(5, 3), signed(5, 3), number, False)
    yield call(aten.threshold_backward.default, signed(5, 3), signed(5, 3), number)
    yield call(aten.native_dropout_backward.default, signed(5, 3), f(5, 3) > 0.5, number)
    yield call(aten.index_add.default, signed(5, 3), 0, torch.tensor([0, 2, 2]), signed(3, 3), alpha=number)
    for alpha, beta in ((number, 1.0), (1.0, number), (number, number)):
        yield call(aten.addmm.default, signed(3), signed(5, 7), signed(7, 3), beta=beta, alpha=alpha)
        yield call(aten.baddbmm.default, signed(4, 5, 3), signed(4, 5, 2), signed(4, 2, 3), beta=beta, alpha=alpha)
        yield call(aten.addmv.default, signed(5), signed(5, 7), signed(7), beta=beta, alpha=alpha)
    lists = [signed(*s) for s in LISTS], [signed(*s) for s in LISTS]
    mixed = [number if i % 2 else 0.5 for i in range(len(LISTS))]
    for name in ("mul", "div"):
        yield call(getattr(aten, f"_foreach_{name}").Scalar, lists[0], number)
        yield call(getattr(aten, f"_foreach_{name}_").ScalarList, lists[0], mixed)
    yield call(aten._foreach_add.List, *lists, alpha=number)
    yield call(aten._foreach_sub_.List, *lists, alpha=number)
    yield call(aten._foreach_lerp.Scalar, *lists, number)
    yield call(aten._foreach_lerp.ScalarList, *lists, mixed)
