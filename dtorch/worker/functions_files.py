"""Device functions that read and write files of tensors: each device only its own part."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy
import torch

from ..placement import is_partial, is_shard
from .assemble import cut
from .registry import Here, device_function


@device_function("dtorch.read_part", writes=(0, 1))
def read_part(
    here: Here, target: torch.Tensor, count: torch.Tensor, path: bytes, stamp: list[int], name: str
) -> tuple[()]:
    """Fill ``target`` with its part of a tensor in a safetensors file, converted to its dtype.

    Args:
        target: this device's part; input layout 0. A pending sum gets the values as its first addend, and zeros.
        count: the bytes read are added to it.
        stamp: what `stamp_of` says of the file; if it says something else now, the file has been changed.
        name: of the tensor in the file.
    """
    placements = here.inputs[0][0]
    if any(is_partial(p) and index for p, index in zip(placements, here.coordinate, strict=True)):
        target.zero_()
    elif target.numel():
        file = os.fsdecode(path)
        try:
            box = tuple(slice(*edge) for edge in here.input_box(0))
            part = opened(file, tuple(stamp)).get_slice(name)[box]  # a view of the mapped file
            target.copy_(part)
        except Exception as error:
            raise OSError(f"cannot read tensor {name!r} from {file}: {error}") from error
        count += part.nbytes
    return ()


@functools.lru_cache(maxsize=4)  # a checkpoint's tensors are read file by file, fused ones maybe from a few
def opened(path: str, stamp: tuple[int, ...]) -> Any:
    """A safetensors file, mapped."""
    from safetensors import safe_open

    found = stamp_of(path)
    if found != stamp:
        raise ValueError("the file was changed while it was being loaded")
    return safe_open(path, framework="pt", device="cpu")


def stamp_of(path: str) -> tuple[int, int, int]:
    """What changes when a file is replaced or written to."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


@device_function("dtorch.close_files")
def close_files(here: Here, count: torch.Tensor) -> tuple[()]:
    """Let go of the file that `read_part` has mapped."""
    opened.cache_clear()
    return ()


@device_function("dtorch.write_part", writes=(1,))
def write_part(here: Here, source: torch.Tensor, count: torch.Tensor, path: bytes, offset: int, name: str) -> tuple[()]:
    """Write this device's part of a tensor to its place in a file, which is as large as it will be; of replicas the first writes.

    Args:
        source: this device's part; input layout 0, which has no pending sums.
        count: the bytes written are added to it.
        offset: where in the file the whole tensor begins.
        name: of the tensor, for errors.
    """
    placements, shape = here.inputs[0]
    if source.numel() and all(is_shard(p) or not index for p, index in zip(placements, here.coordinate, strict=True)):
        file = os.fsdecode(path)
        try:
            whole = mapped(file, offset, shape, source.dtype)
            cut(whole, here.input_box(0)).copy_(source)
        except Exception as error:
            raise OSError(f"cannot write tensor {name!r} to {file}: {error}") from error
        count += source.nbytes
    return ()


def mapped(path: str, offset: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a file from ``offset`` on as a contiguous tensor that is not empty; what is written to it is written to the file."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    return torch.from_numpy(numpy.memmap(path, numpy.uint8, "r+", offset, (nbytes,))).view(dtype).view(tuple(shape))
