"""A program of ours queued on placed tensors: what each way of running one must not forget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..interrupts import critical
from ..sharding.spec import Spec
from ..tensor import Tensor
from . import aliasing
from .controller import Controller
from .values import Value, new_value


def run(
    controller: Controller,
    program: int,
    tensors: Sequence[Tensor],
    results: Sequence[Spec],
    operands: Sequence[Any],
    name: str,
    written: Sequence[int] = (),
) -> list[Value]:
    """Have the workers run a program that they know on ``tensors``.

    Args:
        results: what it gives; nothing of it aliases a tensor.
        name: what an error says it was.
        written: the positions of tensors that it writes in place.

    Returns:
        The values of its results.

    Raises:
        DTorchError: a tensor of a cluster that has ended; with ``sync``, what failed.
    """
    values = queue(controller, program, tensors, len(results), operands, name, written)
    controller.ran(sum([spec.local_nbytes for spec in results]))
    return values


@critical
def queue(
    controller: Controller,
    program: int,
    tensors: Sequence[Tensor],
    results: int,
    operands: Sequence[Any],
    name: str,
    written: Sequence[int] = (),
) -> list[Value]:
    """`run`, without regard to how far behind the workers are."""
    with controller.lock:
        for tensor in tensors:
            if tensor._value.id < controller.floor:
                raise controller.foreign()
            aliasing.refresh(controller, tensor._value)
        values = [new_value() for _ in range(results)]
        controller.issue([program, *[t._value.id for t in tensors], *[v.id for v in values], *operands], name)
        for i in written:
            aliasing.written(controller, tensors[i]._value)
    return values
