"""The safetensors format: eight bytes that say how long the header is, the header in JSON, the tensors' raw bytes.

Reading goes through the library, which can read a part. It can only write whole files out of one process's memory, so the header is
written here, and the workers put their parts behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

#: The dtypes of the format, by its names.
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: What the header uses itself where the names of tensors stand.
METADATA = "__metadata__"

#: The header's own length.
PREFIX = 8
ALIGNMENT = 8


def header(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """The beginning of a file that holds ``tensors``, where in the file each begins, and the file's size.

    As the library does, the widest dtypes come first, so that each tensor is aligned.
    """
    described: dict[str, object] = {METADATA: dict(metadata)}
    starts: dict[str, int] = {}
    position = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)):
        tensor = tensors[name]
        starts[name] = position
        end = position + tensor.numel() * tensor.dtype.itemsize
        described[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    begin = PREFIX + len(text)
    return (
        len(text).to_bytes(PREFIX, "little") + text,
        {name: begin + start for name, start in starts.items()},
        begin + position,
    )


def damage(path: str, size: int) -> str:
    """What is wrong with a file that the library refuses, as far as it can be told: the first tensor that is cut off."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(PREFIX), "little")
        if size < PREFIX or length > size - PREFIX:
            return "the file is truncated within its header, or is no safetensors file"
        try:
            described = json.loads(file.read(length))
            ends = {name: entry["data_offsets"] for name, entry in described.items() if name != METADATA}
            held = size - PREFIX - length
            order: Sequence[str] = sorted(ends, key=lambda name: ends[name])
            cut = next((name for name in order if ends[name][1] > held), None)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return "its header is corrupt"
    if cut is None:
        return "its header does not fit what follows it"
    return (
        f"the file is truncated: tensor {cut!r} should end {ends[cut][1]} bytes behind the header, and there are {held}"
    )
