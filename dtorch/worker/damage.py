"""What a failed command leaves behind: which values nobody may read any more (docs/architecture.md, law 5)."""

from __future__ import annotations

import torch

from ..program import effects
from ..program.ir import Program
from .poison import Poison
from .registry import WRITES


def written_inputs(program: Program, start: int) -> set[int]:
    """The inputs that instructions from ``start`` on write in place, be it through views made in the program."""
    return effects.written_inputs(program, start, WRITES)


def poison_aliases(values: dict[int, torch.Tensor | Poison], written: torch.Tensor, poison: Poison) -> None:
    """Poison every value that shares storage with ``written``."""
    storage = storage_id(written)
    for value, tensor in values.items():
        if isinstance(tensor, torch.Tensor) and storage_id(tensor) == storage:
            values[value] = poison


def storage_id(tensor: torch.Tensor) -> int:
    """What identifies a tensor's storage while the tensor lives."""
    return tensor.untyped_storage()._cdata


def live_bytes(values: dict[int, torch.Tensor | Poison]) -> int:
    """The bytes of the distinct storages that ``values`` keep alive."""
    storages = {}
    for tensor in values.values():
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
