"""Products that are computed where others read them.

In a program a product is often made to be added up or gathered, and nobody looks at it afterwards. Its memory is then asked of what
carries the transfer (`dtorch.worker.comm.shared.SharedMemory.empty`): nothing is copied in, and an all-reduce's result is made in it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..program.effects import memory_of
from ..program.ir import Communication, Op, Program, Reshard, ReshardStart, slots_of

Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes a contiguous tensor of a shape and a dtype, whose values are anything."""

#: Of smaller ones the copy costs no more than to ask for the memory.
LEAST_BYTES = 8 << 20


def moved_away(program: Program) -> frozenset[int]:
    """The indices of the products that one move takes, and nothing looks at after that."""
    made = {
        instruction.outs[0]: index
        for index, instruction in enumerate(program.body)
        if isinstance(instruction, Op) and instruction.name in PRODUCTS and instruction.outs[0] >= 0
    }
    if not made or not any(isinstance(one, (Reshard, ReshardStart)) for one in program.body[min(made.values()) :]):
        return frozenset()
    roots = memory_of(program).roots
    kept = set().union(*(roots[slot] for slot in program.outputs))
    moves: dict[int, Reshard] = {}
    for instruction in program.body:
        move = instruction.move if isinstance(instruction, ReshardStart) else instruction
        for root in {root for slot in slots_of(instruction) for root in roots[slot] if root in made}:
            if isinstance(move, Reshard):
                again = moves.setdefault(root, move) != move
            else:
                again = root in moves or isinstance(instruction, Communication)
            if again:
                kept.add(root)
    return frozenset(made[root] for root in moves if root not in kept)


def computed_into(name: str, plain: Callable[..., torch.Tensor], empty: Empty) -> Callable[..., torch.Tensor]:
    """The product ``name``, with a large result in memory of ``empty``; the same bits as ``plain``, which makes all others."""
    product = PRODUCTS[name]

    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        shape = product.shape(*args)
        dtype = args[0].dtype
        if shape is None or math.prod(shape) * dtype.itemsize < LEAST_BYTES:
            return plain(*args, **kwargs)
        out = empty(shape, dtype)
        product.into(out, *args, **kwargs)
        return out

    return computed


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """``shape(*args)``: of the result, None if it is none to compute so; ``into(out, *args, **kwargs)`` computes it."""

    shape: Callable[..., Sequence[int] | None]
    into: Callable[..., object]


def _of_matrices(first: int) -> Callable[..., Sequence[int] | None]:
    """The result's shape, of tensors of equally many dims: the arguments from ``first`` on."""

    def shape(*args: torch.Tensor) -> Sequence[int] | None:
        left, right = args[first : first + 2]
        return (*left.shape[:-1], right.shape[-1]) if left.ndim == right.ndim else None

    return shape


def _shape_of_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Sequence[int] | None:
    # Of others torch multiplies in another way.
    flat = x.is_contiguous() and x.numel() > 0 and weight.ndim == 2 and (bias is None or bias.ndim == 1)
    return (*x.shape[:-1], weight.shape[0]) if flat else None


def _linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    x, out = x.view(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _shape_of_matmul(a: torch.Tensor, b: torch.Tensor) -> Sequence[int] | None:
    flat = a.ndim >= 2 and a.is_contiguous() and a.numel() > 0 and b.ndim == 2
    return (*a.shape[:-1], b.shape[1]) if flat else None


def _matmul(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a.view(-1, a.shape[-1]), b, out=out.view(-1, out.shape[-1]))


def _shape_of_tensordot(
    a: torch.Tensor, b: torch.Tensor, dims_a: Sequence[int], dims_b: Sequence[int]
) -> Sequence[int] | None:
    # Over all rows, as of a weight's gradient.
    rows = list(range(a.ndim - 1))
    flat = a.numel() > 0 and b.numel() > 0 and a.is_contiguous() and b.is_contiguous() and a.shape[:-1] == b.shape[:-1]
    return (a.shape[-1], b.shape[-1]) if rows and flat and list(dims_a) == list(dims_b) == rows else None


def _tensordot(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *dims: Sequence[int]) -> None:
    torch.mm(a.view(-1, a.shape[-1]).t(), b.view(-1, b.shape[-1]), out=out)


def _out_of(function: Callable[..., torch.Tensor], out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    function(*args, **kwargs, out=out)


PRODUCTS = {
    "aten.mm.default": _Product(_of_matrices(0), functools.partial(_out_of, torch.mm)),
    "aten.bmm.default": _Product(_of_matrices(0), functools.partial(_out_of, torch.bmm)),
    "aten.addmm.default": _Product(_of_matrices(1), functools.partial(_out_of, torch.addmm)),
    "aten.linear.default": _Product(_shape_of_linear, _linear),
    "aten.matmul.default": _Product(_shape_of_matmul, _matmul),
    "aten.tensordot.default": _Product(_shape_of_tensordot, _tensordot),
}
