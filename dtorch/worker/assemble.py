"""Put together what a `Transfer` describes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import memory_pool
from ..raw import copy
from ..sharding.layout import Box, box_shape
from ..sharding.pieces import Piece
from ..sharding.transfer import Transfer

#: Sums and products of these are carried in float32 and rounded once.
NARROW = frozenset((torch.bfloat16, torch.float16))

COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def assemble(transfer: Transfer, read: Callable[[int], torch.Tensor], device: torch.device) -> torch.Tensor:
    """The result of ``transfer``, a fresh contiguous tensor; ``read(d)`` is device ``d``'s local source tensor.

    Terms are reduced in order, element by element: which device does it, and in how many boxes, does not show in the bits.
    """
    terms = transfer.terms
    if len(terms) < 2:
        return _put_together(transfer, terms[0] if terms else (), read, device)
    addends = [_addend(transfer, term, read, device) for term in terms]
    first, second, *_ = addends
    if first.nbytes < memory_pool.SMALLEST_BYTES and first.is_contiguous() and second.is_contiguous():
        return combine_all(transfer.reduce_op, addends)
    return combine_all(transfer.reduce_op, addends, empty(first.shape, first.dtype, device))


def combine_all(op: str, addends: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Two or more ``addends`` reduced in order, in ``out``, which may be one of them, or else fresh, strided as the first two."""
    combine, dtype = COMBINE[op], addends[0].dtype
    first, second, *rest = addends
    if not rest:
        # One operation is rounded once in any dtype.
        return combine(first, second).to(dtype) if out is None else combine(first, second, out=out)
    if dtype in NARROW and op in ("sum", "product"):
        total = first.float()
        combine(total, second, out=total)
    else:
        total = combine(first, second)
    for addend in rest[:-1]:
        combine(total, addend, out=total)
    if out is not None and total.dtype is dtype:
        return combine(total, rest[-1], out=out)
    combine(total, rest[-1], out=total)
    return total.to(dtype) if out is None else out.copy_(total)


def _addend(
    transfer: Transfer, term: tuple[Piece, ...], read: Callable[[int], torch.Tensor], device: torch.device
) -> torch.Tensor:
    """A term that is only read: uncopied where one box of one device is all of it."""
    if len(term) == 1 and not transfer.zeros:
        return cut(read(term[0].device), term[0].source)
    return _put_together(transfer, term, read, device)


def _put_together(
    transfer: Transfer, term: tuple[Piece, ...], read: Callable[[int], torch.Tensor], device: torch.device
) -> torch.Tensor:
    assert transfer.shape is not None, "this device gets no part"
    result = empty(transfer.shape, transfer.dtype, device)
    if transfer.zeros:
        result.zero_()
    for piece in term:
        copy(cut(result, piece.target), cut(read(piece.device), piece.source))
    return result


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor whose values are anything."""
    if device.type == "cpu":
        return memory_pool.empty(shape, dtype)
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``tensor`` that is ``box``."""
    if tensor.shape == box_shape(box):
        return tensor
    for dim, (start, stop) in enumerate(box):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def around(shape: Sequence[int], box: Box | None) -> tuple[Box, ...]:
    """Boxes that make up a tensor of ``shape`` without ``box``, which cuts one dim of it; all of the tensor if it cuts more."""
    whole = tuple((0, size) for size in shape)
    if box is None:
        return (whole,)
    cut_dims = [dim for dim, edge in enumerate(box) if edge != whole[dim]]
    if len(cut_dims) != 1:
        return (whole,)
    (dim,) = cut_dims
    start, stop = box[dim]
    edges = [edge for edge in ((0, start), (stop, shape[dim])) if edge[0] < edge[1]]
    return tuple((*whole[:dim], edge, *whole[dim + 1 :]) for edge in edges)
