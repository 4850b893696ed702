"""Put together what a `Transfer` describes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..sharding.layout import Box
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
    if len(terms) == 1 or not terms:
        return _put_together(transfer, terms[0] if terms else (), read, device)
    combine, narrow = COMBINE[transfer.reduce_op], transfer.dtype in NARROW and transfer.reduce_op in ("sum", "product")
    total = _put_together(transfer, terms[0], read, device)
    if narrow:
        total = total.float()
    for term in terms[1:]:
        combine(total, _addend(transfer, term, read, device), out=total)
    return total.to(transfer.dtype)


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
    make = torch.zeros if transfer.zeros else torch.empty
    result = make(transfer.shape, dtype=transfer.dtype, device=device)
    for piece in term:
        cut(result, piece.target).copy_(cut(read(piece.device), piece.source))
    return result


def cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``tensor`` that is ``box``."""
    for dim, (start, stop) in enumerate(box):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor
