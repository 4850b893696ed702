"""The strides that torch's TensorIterator gives the result of a pointwise op, and `empty_like` a copy.

Restated from its C++ (``TensorIterator.cpp``: compute_fast_setup_type, reorder_dimensions, compatible_stride; torch 2.13), for a meta
kernel takes 90 to 400 us to say it: what each op on a transposed or sliced tensor would cost in every decode step. Strides of dims of
size 1 may be others than torch's, for they mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .spec import contiguous_stride

Strided = tuple[tuple[int, ...], tuple[int, ...]]
"""A shape and a stride."""


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """As torch means it: whatever the strides of dims of size 1, and of tensors without elements."""
    step = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if own != step and 0 not in shape:
                return False
            step *= size
    return True


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps: those of a contiguous tensor, with its dims in any order."""
    step = 1
    for own, size in sorted([(own, size) for size, own in zip(shape, stride, strict=True) if size != 1]):
        if own != step:
            return False
        step *= size
    return True


def is_channels_last(value: Any) -> bool:
    """As c10's is_channels_last_strides_2d and _3d: an order that could be either is contiguous."""
    if len(value.shape) not in (4, 5) or value.stride[1] == 0:
        return False
    least = 0
    for dim in (1, *range(len(value.shape) - 1, 1, -1), 0):
        size, stride = value.shape[dim], value.stride[dim]
        if size == 0 or stride < least or (dim == 0 and least == value.stride[1]):
            return False
        least = stride * size
    return True


def iterated(shape: tuple[int, ...], operands: Sequence[Strided]) -> tuple[int, ...]:
    """The strides of a fresh result of ``shape``, to which the shapes of ``operands`` broadcast."""
    if 0 in shape:
        return contiguous_stride(shape)
    if all(own == shape for own, _ in operands):
        first = operands[0][1]
        if all(is_contiguous(*one) for one in operands):
            return contiguous_stride(shape)
        if all(stride == first for _, stride in operands) and is_dense(shape, first):
            return first
    return _compatible(shape, _order(shape, [_expanded(shape, *one) for one in operands]))


def preserved(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a copy in torch.preserve_format."""
    return iterated(shape, [(shape, stride)])


def _expanded(shape: tuple[int, ...], own: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides of an operand at the shape of the result; 0 where it is broadcast."""
    offset = len(shape) - len(own)
    return [0] * offset + [
        0 if size == 1 and shape[offset + dim] != 1 else step
        for dim, (size, step) in enumerate(zip(own, stride, strict=True))
    ]


def _order(shape: tuple[int, ...], strides: Sequence[Sequence[int]]) -> list[int]:
    """The dims of the result, the innermost first: an insertion sort, for not every pair can be compared."""
    order = list(range(len(shape) - 1, -1, -1))
    for at in range(1, len(order)):
        moving = at
        for before in range(at - 1, -1, -1):
            found = _compare(shape, strides, order[before], order[moving])
            if found > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
            elif found < 0:
                break
    return order


def _compare(shape: tuple[int, ...], strides: Sequence[Sequence[int]], inner: int, outer: int) -> int:
    """Whether two dims are to change places (1), or not (-1), by the first operand that can tell; 0 if none can."""
    for stride in strides:
        a, b = stride[inner], stride[outer]
        if a == 0 or b == 0:
            continue
        if a != b:
            return 1 if a > b else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _compatible(shape: tuple[int, ...], order: Sequence[int]) -> tuple[int, ...]:
    stride = [0] * len(shape)
    step = 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)
