"""The database's samples of an op: a few that differ as much as possible, none of them large."""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_map

LARGEST = 50_000
"""Elements of all the tensors of a sample; a larger one is only taken when there is no other."""
LOOK_AT = 400
"""Samples of an op that are drawn before choosing."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Arguments of a call: ``args[0]`` is the op's ``input``. Tensors inside are never handed out, only copies."""

    args: tuple
    kwargs: dict[str, Any]
    broadcasts_input: bool = False
    output: Callable[[Any], Any] = lambda out: out

    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in tree_flatten((self.args, self.kwargs))[0] if isinstance(leaf, torch.Tensor)]

    def convert(self, function: Callable[[torch.Tensor], Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with ``function`` applied to each tensor, in the order of `tensors`."""
        return tree_map(
            lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, (self.args, self.kwargs)
        )


def seed(name: str) -> None:
    """Seed every generator that the databases draw from (torch.manual_seed itself formats the whole stack, three times)."""
    number = zlib.crc32(name.encode())
    random.seed(number)
    numpy.random.seed(number)
    torch.default_generator.manual_seed(number)


def of_op(op: Any, dtype: torch.dtype, requires_grad: bool, limit: int) -> list[Sample]:
    """Up to ``limit`` samples of an OpInfo."""
    seed(op.formatted_name)
    # Not sample_inputs, which walks the whole stack for every sample.
    drawn = itertools.islice(op.sample_inputs_func(op, "cpu", dtype, requires_grad), LOOK_AT)
    samples = (Sample((s.input, *s.args), dict(s.kwargs), s.broadcasts_input, s.output_process_fn_grad) for s in drawn)
    return choose(samples, limit)


def choose(samples: Iterable[Sample], limit: int) -> list[Sample]:
    """Up to ``limit`` of ``samples``: of each kind one before a second of any, larger ones first."""
    kinds: dict[tuple, list[Sample]] = {}
    for sample in samples:
        if all(t.layout == torch.strided and not t.is_quantized for t in sample.tensors()):
            kinds.setdefault(_kind(sample), []).append(sample)
    for members in kinds.values():
        random.Random(0).shuffle(members)  # neighbours in the database are often alike
        members.sort(key=_rank)
    order = sorted(kinds.values(), key=lambda members: _rank(members[0]))
    rounds = itertools.zip_longest(*order)
    return [sample for members in rounds for sample in members if sample is not None][:limit]


def _kind(sample: Sample) -> tuple:
    return (
        tuple(tensor.ndim for tensor in sample.tensors()),
        tuple(sorted(sample.kwargs)),
        tuple(type(value).__name__ for value in sample.args),
    )


def _rank(sample: Sample) -> tuple:
    """Small enough, not empty, many dims, many elements (to the nearest power of two)."""
    tensors = sample.tensors()
    elements = sum(tensor.numel() for tensor in tensors)
    return (
        elements > LARGEST,
        any(tensor.numel() == 0 for tensor in tensors),
        -max((tensor.ndim for tensor in tensors), default=0),
        elements if elements > LARGEST else -elements.bit_length(),
    )
