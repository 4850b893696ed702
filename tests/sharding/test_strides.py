"""The strides, shapes and errors of the formulas for strided tensors are those of plain torch: random layouts, by op."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtorch.sharding import fast_shapes
from dtorch.sharding.strides import is_contiguous, is_dense

from .test_shapes import wrong

aten = torch.ops.aten
SIZES = (1, 1, 2, 3, 4)


def pointwise() -> list[Any]:
    packets = [getattr(aten, name) for name in dir(aten)]
    ops = [getattr(p, overload) for p in packets if hasattr(p, "overloads") for overload in p.overloads()]
    known = [op for op in ops if fast_shapes.formula_of(op) is fast_shapes.pointwise]
    # Of those torch's meta kernels are asked; oneDNN's kernel of the last refuses some operands that broadcast.
    return [op for op in known if op not in {*fast_shapes.NOT_ITERATED, aten.gelu_backward.default}]


def strided(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Its dims in any order, maybe with gaps, expanded, or with strides of dims of size 1 that mean nothing."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    sizes = [shape[d] for d in order]
    gaps = bool(sizes) and rng.random() < 0.3
    if gaps:
        sizes[-1] *= 2
    tensor = (torch.rand(sizes, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))) * 3 + 1).to(dtype)
    if gaps:
        tensor = tensor[..., ::2]
    tensor = tensor.permute([order.index(d) for d in range(len(shape))])
    if shape and 0 not in shape and rng.random() < 0.15:
        tensor = tensor.narrow(rng.randrange(len(shape)), 0, 1).expand(shape)
    if rng.random() < 0.2:
        stride = [rng.choice((0, 1, 5, 100)) if n == 1 else s for n, s in zip(shape, tensor.stride(), strict=True)]
        tensor = tensor.as_strided(shape, stride)
    return tensor


def some_shape(rng: random.Random, least: int = 0, most: int = 5) -> tuple[int, ...]:
    return tuple(rng.choice(SIZES) for _ in range(rng.randint(least, most)))


def smaller(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """One that broadcasts to ``shape``."""
    kept = shape[rng.randint(0, len(shape)) :] if rng.random() < 0.3 else shape
    return tuple(1 if rng.random() < 0.25 else n for n in kept)


@pytest.mark.parametrize("seed", range(4))
def test_pointwise(seed: int) -> None:
    rng = random.Random(seed)
    found = []
    for op in pointwise():
        for _ in range(4):
            shape = some_shape(rng)
            dtype = rng.choice((torch.float32, torch.int64, torch.bool))
            args: list[Any] = []
            for argument in op._schema.arguments:
                kind = str(argument.type)
                if argument.kwarg_only or (kind not in ("Tensor", "number", "float", "int", "bool")):
                    break
                if kind == "Tensor":
                    # The first is of the result's shape half of the time only: a later one may be larger.
                    own = shape if rng.random() < 0.6 else smaller(rng, shape)
                    args.append(strided(rng, own, dtype))
                else:
                    args.append({"float": 2.0, "int": 2, "bool": True}.get(kind, 2.0 if dtype.is_floating_point else 2))
            found.append(_stride_differs(op, args))
    assert not [w for w in found if w], "\n".join([w for w in found if w][:10])


def _stride_differs(op: Any, args: list[Any]) -> str | None:
    """As `wrong`, but for errors, which `test_samples` has: calls here are made without regard to what is legal."""
    try:
        op(*args)
    except Exception:
        return None
    return wrong(op, args, {})


def _view(rng: random.Random) -> tuple[Any, list[Any]]:
    x = strided(rng, some_shape(rng))
    sizes = list(x.shape)
    for _ in range(rng.randint(0, 3)):
        if len(sizes) > 1 and rng.random() < 0.5:
            at = rng.randrange(len(sizes) - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        elif sizes:
            at = rng.randrange(len(sizes))
            sizes[at : at + 1] = rng.choice(([1, sizes[at]], [sizes[at], 1], [2, sizes[at] // 2]))
    if sizes and rng.random() < 0.3:
        sizes[rng.randrange(len(sizes))] = -1
    return aten.view.default, [x, sizes]


def _expand(rng: random.Random) -> tuple[Any, list[Any]]:
    shape = some_shape(rng, 0, 4)
    size = [rng.choice((n, -1, 5 if n == 1 else n)) for n in shape]
    return aten.expand.default, [strided(rng, shape), [rng.choice(SIZES) for _ in range(rng.randint(0, 2))] + size]


def _cat(rng: random.Random) -> tuple[Any, list[Any]]:
    shape = list(some_shape(rng, 1))
    dim = rng.randrange(len(shape))
    parts = []
    for _ in range(rng.randint(1, 3)):
        shape[dim] = rng.choice((0, *SIZES))
        parts.append(strided(rng, tuple(shape)))
    return aten.cat.default, [parts, rng.choice((dim, dim - len(shape)))]


def _dim(op: Any, *others: Callable[[random.Random], int]) -> Callable[[random.Random], tuple[Any, list[Any]]]:
    def call(rng: random.Random) -> tuple[Any, list[Any]]:
        x = strided(rng, some_shape(rng))
        return op, [x, rng.randint(-x.ndim - 1, x.ndim + 1), *[other(rng) for other in others]]

    return call


def _permute(rng: random.Random) -> tuple[Any, list[Any]]:
    x = strided(rng, some_shape(rng))
    dims = list(range(x.ndim))
    rng.shuffle(dims)
    return aten.permute.default, [x, [d - x.ndim if rng.random() < 0.3 else d for d in dims]]


def _matrices(op: Any, batch: int, second: int) -> Callable[[random.Random], tuple[Any, list[Any]]]:
    def call(rng: random.Random) -> tuple[Any, list[Any]]:
        before = tuple(rng.choice(SIZES) for _ in range(batch))
        m, k, n = (rng.choice((0, *SIZES)) for _ in range(3))
        other = k + (rng.random() < 0.1)
        dtype = rng.choice((torch.float32, torch.float64, torch.int64))
        return op, [strided(rng, (*before, m, k), dtype), strided(rng, (*before[batch - second :], other, n), dtype)]

    return call


def _linear(rng: random.Random) -> tuple[Any, list[Any]]:
    *shape, inner = some_shape(rng, 2)
    bias = [strided(rng, (3,))] if rng.random() < 0.5 else []
    return aten.linear.default, [strided(rng, (*shape, inner)), strided(rng, (3, inner)), *bias]


def _attention(rng: random.Random) -> tuple[Any, list[Any]]:
    batch, heads, length, keys, width = (rng.choice((1, 2, 3)) for _ in range(5))
    q, k, v = (strided(rng, (batch, n, s, width)) for n, s in ((heads * 2, length), (heads, keys), (heads, keys)))
    return aten._scaled_dot_product_flash_attention_for_cpu.default, [q, k, v]


def _embedding(rng: random.Random) -> tuple[Any, list[Any]]:
    return aten.embedding.default, [strided(rng, (9, 3)), strided(rng, some_shape(rng), torch.int64)]


CALLS = {
    "view": _view,
    "expand": _expand,
    "cat": _cat,
    "permute": _permute,
    "transpose": _dim(aten.transpose.int, lambda rng: rng.randint(-4, 4)),
    "t": lambda rng: (aten.t.default, [strided(rng, some_shape(rng, 0, 3))]),
    "unsqueeze": _dim(aten.unsqueeze.default),
    "squeeze": _dim(aten.squeeze.dim),
    "select": _dim(aten.select.int, lambda rng: rng.randint(-4, 4)),
    "clone": lambda rng: (aten.clone.default, [strided(rng, some_shape(rng))]),
    "mm": _matrices(aten.mm.default, 0, 0),
    "bmm": _matrices(aten.bmm.default, 1, 1),
    "matmul": _matrices(aten.matmul.default, 2, 1),
    "linear": _linear,
    "attention": _attention,
    "embedding": _embedding,
}


@pytest.mark.parametrize("name", CALLS)
def test_views_and_products(name: str) -> None:
    rng = random.Random(0)
    found = [wrong(op, args, {}) for op, args in [CALLS[name](rng) for _ in range(60)]]
    assert not [w for w in found if w], "\n".join([w for w in found if w][:10])


def test_contiguous_and_dense() -> None:
    rng = random.Random(0)
    for _ in range(300):
        x = strided(rng, some_shape(rng))
        assert is_contiguous(x.shape, x.stride()) == x.is_contiguous()
        order = sorted(range(x.ndim), key=lambda d, x=x: x.stride(d), reverse=True)
        assert is_dense(x.shape, x.stride()) == x.permute(order).is_contiguous()
