"""Tensors as raw bytes, and dtypes by name: how values travel in messages and through shared memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch

#: Tensors of at least this many bytes are copied into huge pages.
HUGE_BYTES = 4 << 20


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a CPU tensor in row-major order, as a 1-d uint8 tensor; a view where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A dim of size 1 may keep any stride in a "contiguous" tensor, which view(dtype) would refuse.
    flat = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
    return flat.view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a tensor of any dtype, in row-major order."""
    return flat_bytes(tensor.cpu()).numpy().tobytes() if tensor.numel() else b""


def from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor of its own from `to_bytes`."""
    if not data:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(tuple(shape))


def copied(flat: torch.Tensor) -> torch.Tensor:
    """A copy of a 1-d uint8 tensor. A large one lies in huge pages, since touching small ones the first time costs more than the copy."""
    if flat.numel() < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return flat.clone()
    memory = mmap.mmap(-1, flat.numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).copy_(flat)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_called(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; ValueError for anything else."""
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
