"""Tensors as raw bytes, and dtypes by name: how values travel in messages and through shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

# From about here on libc writes past the caches, and a copy takes 0.6 of torch's time (256 MB: 20 ms and 35 ms).
_PAST_CACHES = 1 << 24

#: Real types that numpy has too.
_NUMPYS = frozenset(
    (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a CPU tensor in row-major order, as a 1-d uint8 tensor; a view where it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A dim of size 1 may keep any stride in a "contiguous" tensor, which view(dtype) would refuse.
    flat = plain.as_strided((plain.numel(),), (1,), plain.storage_offset())
    return flat.view(torch.uint8)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of the bytes of a tensor of any dtype, in row-major order."""
    if tensor.dtype in _NUMPYS and tensor.is_cpu and not tensor.requires_grad and not tensor.is_neg():
        return tensor.numpy().tobytes()  # a third of the general way's time
    return flat_bytes(tensor.cpu()).numpy().tobytes() if tensor.numel() else b""


def from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor of its own from `to_bytes`."""
    if not data:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).view(tuple(shape))


def copy(target: torch.Tensor, source: torch.Tensor, *, least: int = _PAST_CACHES) -> None:
    """``target.copy_(source)`` between cpu tensors of one shape; by libc, where that is possible, from ``least`` bytes on."""
    nbytes = target.nbytes
    if (
        nbytes >= least
        and target.dtype is source.dtype
        and target.is_contiguous()
        and source.is_contiguous()
        and not (source.is_conj() or source.is_neg() or source.is_cuda)
    ):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)
    else:
        target.copy_(source)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_called(name: str) -> torch.dtype:
    """The inverse of `dtype_name`; ValueError for anything else."""
    found: Any = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
