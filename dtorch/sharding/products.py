"""Whether torch's way of a product, as one of two matrices, would move a split tensor.

It makes one dim of several. A split of the first of them into equal parts is a split of that dim, and any other is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .fast_shapes import broadcast
from .spec import Spec


def linear_breaks(x: Spec) -> bool:
    """For (…, I) as the input of ``linear``."""
    return _breaks(x, range(x.ndim - 1), x.shape)


def batch_of(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...] | None:
    """The common shape of what comes before the last two dims; None if there is none."""
    return broadcast([tuple(a[:-2]), tuple(b[:-2])])


def matmul_breaks(a: Spec, b: Spec, batch: tuple[int, ...]) -> bool:
    """For (…, M, K) and (…, K, N) as the operands of ``matmul``, of this common batch: not both are matrices."""
    if b.ndim == 2:
        return _breaks(a, range(a.ndim - 1), a.shape)
    if a.ndim == 2:  # both are transposed
        return _breaks(b, [*range(b.ndim - 2), b.ndim - 1], b.shape)
    return any(_breaks(t, range(t.ndim - 2), batch[len(batch) - t.ndim + 2 :]) for t in (a, b))


def tensordot_breaks(a: Spec, b: Spec, dims_a: Sequence[int], dims_b: Sequence[int]) -> bool:
    """For ``tensordot`` over these dims; False for what is not legal, or broadcasts."""
    if len(dims_a) != len(dims_b) or not all(
        -a.ndim <= i < a.ndim and -b.ndim <= j < b.ndim and a.shape[i] == b.shape[j]
        for i, j in zip(dims_a, dims_b, strict=True)
    ):
        return False
    for spec, dims in ((a, [i % a.ndim for i in dims_a]), (b, [j % b.ndim for j in dims_b])):
        if len(set(dims)) < len(dims):
            return False
        rest = [d for d in range(spec.ndim) if d not in dims]
        if _breaks(spec, dims, spec.shape) or _breaks(spec, rest, spec.shape):
            return True
    return False


def _breaks(spec: Spec, dims: Iterable[int], sizes: Sequence[int]) -> bool:
    """Whether making one dim of ``dims``, which have these ``sizes`` by then, moves the tensor."""
    if spec.replicated:
        return False
    merged = [d for d in dims if sizes[d] != 1]
    if len(merged) < 2:
        return False
    first, *others = merged
    return bool(spec.shape[first] % spec.shards(first)) or any(spec.shards(d) > 1 for d in others)
