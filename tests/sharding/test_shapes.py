"""The shapes, strides, dtypes and errors that planning infers are those of plain torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.sharding import shapes
from dtorch.sharding.strategy import TensorArg

from .ground_truth import dense, tensors, tree
from .test_rules import captured, written

aten = torch.ops.aten


def arg(t: torch.Tensor) -> TensorArg:
    return TensorArg(0, tuple(t.shape), t.stride(), t.dtype)


def meaning(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple:
    """Strides of dims of size 1, and of tensors without elements, mean nothing."""
    return tuple(shape), () if 0 in shape else tuple(s for n, s in zip(shape, stride, strict=True) if n != 1), dtype


def wrong(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """What differs between `shapes.infer` and the real op, in words."""
    error = failure = None
    expected: Any = None
    inferred: Any = None
    try:
        with torch.no_grad():
            result = tensors(op(*tree(args, dense), **tree(kwargs, dense)))
        expected = [None if t is None else meaning(t.shape, t.stride(), t.dtype) for t in result]
    except NotImplementedError:
        return None  # the workers may have a kernel that the CPU lacks
    except Exception as e:
        error = str(e).split("\n")[0]
    try:
        found = shapes.infer(op, tree(tree(args, dense), arg), tree(tree(kwargs, dense), arg))
        inferred = [None if m is None else meaning(*m) for m in found]
    except Exception as e:
        failure = str(e).split("\n")[0]
    if (expected, error) == (inferred, failure):
        return None
    return f"{op} {tree(args, arg)} {kwargs}: {inferred} {failure}, torch: {expected} {error}"


@pytest.mark.parametrize("source", [written, captured])
def test_samples(source) -> None:
    found = [wrong(s.op, s.args, s.kwargs) for s in source()]
    found = [w for w in found if w]
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize(
    "call",
    [
        *(lambda x, dims=dims: aten._fft_r2c(x, dims, 0, True) for dims in ([0, 1, 2], [1, 0], [2])),
        *(lambda x, dims=dims: aten._fft_c2c(x + 0j, dims, 0, True) for dims in ([0, 1, 2], [1, 0], [2])),
        *(lambda x, dims=dims: aten._fft_c2r(x + 0j, dims, 0, 4) for dims in ([0, 1, 2], [1, 0], [2])),
        *(lambda x, full=full: aten._linalg_svd(x, full) for full in (True, False)),
        lambda x: aten.linalg_eig(x @ x.mT),
        lambda x: aten.nonzero_static(x, size=5),
        lambda x: torch.nn.functional.conv2d(x[None], torch.ones(2, 4, 3, 3)),
        lambda x: torch.nn.functional.conv_transpose2d(x[None], torch.ones(4, 2, 3, 3)),
        lambda x: torch.nn.functional.interpolate(x[None], scale_factor=2.0, mode="bilinear"),
        lambda x: torch.nn.functional.max_pool2d(x[None], 2),
        lambda x: torch.nn.functional.pixel_shuffle(x[None], 2),
        lambda x: torch.nn.functional.channel_shuffle(x[None], 2),
        lambda x: torch.nn.functional.max_unpool2d(x[None], torch.arange(120).view(1, 4, 5, 6), 2),
        lambda x: torch.nn.functional.conv_transpose2d(x[None, :, :1, :1], torch.ones(4, 2, 3, 3)),
        lambda x: torch.nn.functional.pad(x[None], (1, 1, 1, 1), mode="reflect"),
        lambda x: torch.nn.functional.pad(x[None], (1, 1, 1, 1), mode="replicate"),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_strides_are_those_of_a_cpu(call, order) -> None:
    """Many a meta kernel takes a meta tensor for one on CUDA. The last order is channels-last."""
    base = torch.randn([(4, 5, 6)[d] for d in order], generator=torch.Generator().manual_seed(0))
    seen: list = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(wrong(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Watch():
        call(base.permute([order.index(d) for d in range(3)]))
    assert seen
    assert not any(seen), seen


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float64, torch.int32)
BINARY = ("add", "mul", "div", "eq", "sub", "add_", "mul_")
UNARY = (
    "relu",
    "exp",
    "neg",
    "abs",
    "silu",
    "gelu",
    "sigmoid",
    "rsqrt",
    "clone",
    "logical_not",
    "floor",
    "isnan",
    "sqrt",
)


class Draw:
    """Random tensors that broadcast, mostly, with some transposed ones, of some dtype."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.base = [self.random.choice([1, 2, 3, 4, 0, 5]) for _ in range(self.random.randint(0, 4))]

    def tensor(self, shape: Sequence[int] | None = None, dtypes: Sequence[torch.dtype] = DTYPES) -> torch.Tensor:
        if shape is None:
            shape = [n if self.random.random() < 0.7 else 1 for n in self.base][
                self.random.randint(0, len(self.base)) :
            ]
        t = torch.ones(tuple(shape)).to(self.random.choice(dtypes))
        if t.ndim > 1 and self.random.random() < 0.3:
            i, j = self.random.sample(range(t.ndim), 2)
            t = t.transpose(i, j).contiguous().transpose(i, j) if self.random.random() < 0.5 else t.transpose(i, j)
        return t

    def calls(self) -> list[tuple]:
        pick = self.random.choice
        power = aten.pow.Tensor_Scalar
        binary = pick([aten.maximum.default, aten.pow.Tensor_Tensor, *(getattr(aten, name).Tensor for name in BINARY)])
        found: list[tuple] = [
            (binary, self.tensor(), self.tensor()),
            (pick([aten.add.Tensor, aten.mul_.Tensor, aten.eq.Scalar, power]), self.tensor(), pick([2, 0.5, True])),
            (getattr(aten, pick(UNARY)).default, self.tensor(self.base)),
            (aten.where.self, self.tensor(None, [torch.bool]), self.tensor(), self.tensor()),
        ]
        ndim = len(self.base)
        if ndim:
            dims = self.random.sample(range(ndim), self.random.randint(0, ndim))
            other = list(self.base)
            other[0] = pick([0, 1, 3])
            two = DTYPES[:2]
            found += [
                (
                    pick([aten.sum.dim_IntList, aten.mean.dim, aten.amax.default]),
                    self.tensor(self.base),
                    dims,
                    pick([True, False]),
                ),
                (aten.linalg_vector_norm.default, self.tensor(self.base), pick([2, float("inf")]), dims or None, True),
                (aten._softmax.default, self.tensor(self.base, DTYPES[:3]), self.random.randint(-ndim, ndim), False),
                (pick([aten.cumsum.default, aten.tril.default]), self.tensor(self.base), self.random.randint(-2, 2)),
                (aten.cat.default, [self.tensor(self.base, two), self.tensor(other, two)], pick([0, -1])),
                (
                    aten.stack.default,
                    [self.tensor(self.base, two), self.tensor(self.base, two)],
                    self.random.randint(-4, 4),
                ),
                (aten.zeros_like.default, self.tensor(self.base)),
            ]
            weight = self.tensor(self.base[-1:], DTYPES[:3])
            found.append(
                (
                    aten.native_layer_norm.default,
                    self.tensor(self.base, DTYPES[:3]),
                    [self.base[-1]],
                    weight,
                    weight,
                    1e-5,
                )
            )
        m, k, n = (pick([0, 1, 3, 4]) for _ in range(3))
        bias = self.tensor(pick([(n,), (m, n), (1, n), (m, 1), (), (5,)]), DTYPES[:2])
        found.append(
            (aten.addmm.default, bias, self.tensor((m, k), DTYPES[:2]), self.tensor((pick([k, k, 2]), n), DTYPES[:2]))
        )
        return found


@pytest.mark.parametrize("part", range(4))
def test_drawn_calls(part: int) -> None:
    found = [wrong(op, args, {}) for seed in range(part, 400, 4) for op, *args in Draw(seed).calls()]
    found = [w for w in found if w]
    assert not found, "\n".join(found[:10])


def test_sizes_that_depend_on_values() -> None:
    x = arg(torch.ones(3, 4))
    mask = arg(torch.ones(3, dtype=torch.bool))
    for op, args in (
        (aten.nonzero.default, [x]),
        (aten.masked_select.default, [x, mask]),
        (aten.index.Tensor, [x, [mask]]),
    ):
        with pytest.raises(shapes.DataDependent):
            shapes.infer(op, args, {})


def test_large_tensors_take_no_memory() -> None:
    x = TensorArg(0, (1 << 40, 8), (8, 1), torch.float32)
    assert shapes.infer(aten.sort.default, [x], {})[0] == ((1 << 40, 8), (8, 1), torch.float32)
    with pytest.raises(RuntimeError):
        shapes.infer(aten.add.Tensor, [x, TensorArg(1, (1 << 40, 7), (7, 1), torch.float32)], {})
