"""What a checkpoint holds: every tensor's file, shape and dtype, read from the headers; no values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..worker.functions_files import opened, stamp_of
from .formats import DTYPES, damage

INDEX = ".safetensors.index.json"
WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file; ``stamp`` is that of the file when its header was read."""

    name: str
    path: str
    stamp: tuple[int, int, int]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The whole tensor, as a view of the mapped file; OSError if that was changed meanwhile."""
        try:
            return opened(self.path, self.stamp).get_tensor(self.name)
        except Exception as error:
            raise OSError(f"cannot read tensor {self.name!r} from {self.path}: {error}") from error


def named_path(function: str, path: Any) -> str:
    """The path that ``function`` was given, as a str; TypeError if it is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{function}(): argument 'path' must be a path, not {type(path).__name__}")
    return os.fspath(path)


def entries_of(path: str | os.PathLike[str], stem: str = "model") -> dict[str, Entry]:
    """Every tensor of a checkpoint: a safetensors file, an index file, or a folder that holds either.

    Args:
        stem: what the files in a folder are called; a folder's only checkpoint may have any name.

    Raises:
        FileNotFoundError: nothing there, or a file that the index names is missing.
        ValueError: a file that is truncated or corrupt, an index that does not fit its files, a dtype that torch lacks.
    """
    found = _file_of(Path(os.path.abspath(os.fspath(path))), stem)
    if not found.name.endswith(INDEX):
        return _entries(str(found), None)
    weight_map = _weight_map(found)
    entries: dict[str, Entry] = {}
    files: dict[str, dict[str, Entry]] = {}
    for name, file in weight_map.items():
        if file not in files:
            there = found.parent / file
            if not there.is_file():
                raise FileNotFoundError(
                    f"tensor {name!r} should be in {there}, says {found}, but there is no such file"
                )
            files[file] = _entries(str(there), name)
        entry = files[file].get(name)
        if entry is None:
            raise ValueError(
                f"tensor {name!r} should be in {found.parent / file}, says {found}, but that file lacks it"
            )
        entries[name] = entry
    for held in files.values():  # a tensor that the index forgot is in the checkpoint all the same
        for name, entry in held.items():
            entries.setdefault(name, entry)
    return entries


def _file_of(path: Path, stem: str) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    if path.is_file():
        if not path.name.endswith((INDEX, WEIGHTS)):
            raise ValueError(f"{path} is no safetensors file: its name must end in {WEIGHTS} or {INDEX}")
        return path
    for suffix in (INDEX, WEIGHTS):
        if (path / f"{stem}{suffix}").is_file():
            return path / f"{stem}{suffix}"
    for suffix in (INDEX, WEIGHTS):
        found = sorted(path.glob(f"*{suffix}"))
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(
                f"{path} holds several checkpoints, {', '.join(f.name for f in found)}: give the path of one of them"
            )
    names = sorted(child.name for child in path.iterdir())[:10]
    hint = "; pickled checkpoints (.bin, .pt) are not read, save them as safetensors first" if names else ""
    raise FileNotFoundError(
        f"{path} holds no {stem}{WEIGHTS} and no {stem}{INDEX}, only {', '.join(names) or 'nothing'}{hint}"
    )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        legal = isinstance(weight_map, Mapping) and all(
            isinstance(file, str)
            and file.endswith(WEIGHTS)
            and not os.path.isabs(file)
            and ".." not in Path(file).parts
            for file in weight_map.values()
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        legal = False
    if not legal:
        raise ValueError(
            f"{index} is no index of safetensors files: it must be JSON with a 'weight_map' of tensor names to files beside it"
        )
    return weight_map


def _entries(path: str, wanted: str | None) -> dict[str, Entry]:
    """The tensors of one file; ``wanted``: one that is looked for in it."""
    stamp = stamp_of(path)
    try:
        file = _open(path)
        entries = {}
        for name in file.keys():  # noqa: SIM118 - it is no dict
            part = file.get_slice(name)
            code = part.get_dtype()
            if code not in DTYPES:
                raise ValueError(f"tensor {name!r} in {path} is of dtype {code}, which torch lacks")
            entries[name] = Entry(name, path, stamp, torch.Size(part.get_shape()), DTYPES[code])
    except _library_error() as error:
        looked_for = "" if wanted is None else f"cannot read tensor {wanted!r}: "
        raise ValueError(f"{looked_for}{path}: {damage(path, stamp[1])} ({error})") from error
    except OSError as error:
        raise type(error)(f"cannot read {path}: {error}") from error
    return entries


def _open(path: str) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt", device="cpu")


def _library_error() -> type[Exception]:
    from safetensors import SafetensorError

    return SafetensorError
