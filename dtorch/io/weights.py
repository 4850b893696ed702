"""Load and save the weights of a module: safetensors files, as Hugging Face lays them out."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import hints
from . import formats, transfers
from .atomic import replacing_file, replacing_folder
from .checkpoints import INDEX, WEIGHTS, Entry, entries_of, named_path

#: Near misses and complaints listed in an error.
LISTED = 8

DEFAULT_SHARD_SIZE = "5GB"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` did.

    Attributes:
        missing_keys: tensors of the module that the checkpoint lacks; they keep their values.
        unexpected_keys: tensors of the checkpoint that the module lacks.
        bytes_read: how many bytes of the files each device has read, by ``torch.device``; ``"client"`` for plain and uncommitted tensors.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    bytes_read: transfers.Moved


@hints.takes
def load(
    module: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True, progress: bool = True
) -> Loaded:
    """Fill the tensors of ``module`` from a safetensors checkpoint; each worker reads the parts it holds, the client none.

    What ``module.load_state_dict(load_file(path))`` does, on whatever mesh and placements the module is: values are written in place,
    converted to the dtype that each tensor has. Files are mapped into memory, so that a part costs what it is large. A tied tensor may
    be in the checkpoint under any of its names. Plain and uncommitted tensors are filled by this process.

    Args:
        module: its tensors may not be on the meta device: `distribute_module` places such ones.
        path: a ``.safetensors`` file, an ``.index.json`` file, or a folder that holds one (``model.safetensors``).
        strict: whether tensors that either side lacks are an error.
        progress: show a bar of bytes, where standard error is a terminal.

    Raises:
        FileNotFoundError: no checkpoint there, or a file of it is missing.
        ValueError: a truncated or corrupt file, a wrong shape, a dtype that cannot be converted, and, if ``strict``, missing and
            unexpected tensors. Each names the tensor and the file. Nothing has been changed then.
        RemoteError: a file became unreadable meanwhile; the tensors that were to be filled have no value then.

    Example::

        >>> layer = distribute_module(torch.nn.Linear(4, 2), DeviceMesh("cpu", [0, 1]), {"*": [Shard(0)]})
        >>> path = os.path.join(tempfile.mkdtemp(), "layer.safetensors")
        >>> _ = save(layer, path)
        >>> load(layer, path).bytes_read
        {device(type='cpu', index=0): 20, device(type='cpu', index=1): 20}
    """
    _check_module("load", module)
    pairs, missing, unexpected = match("load", targets_of(module), entries_of(named_path("load", path)), path, strict)
    return Loaded(missing, unexpected, transfers.read(pairs, progress))


@dataclass(slots=True)
class Target:
    """A tensor to fill, with every name it has."""

    tensor: torch.Tensor
    names: list[str]


def targets_of(module: torch.nn.Module) -> list[Target]:
    """The tensors of a module's state dict, each once."""
    held = {id(tensor) for tensor in [*module.parameters(), *module.buffers()]}
    found: dict[int, Target] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if id(tensor) not in held:
            raise TypeError(
                f"{name!r} is made by a hook of the state dict; what it is made of cannot be filled through it"
            )
        found.setdefault(id(tensor), Target(tensor, [])).names.append(name)
    return list(found.values())


Pairs = list[tuple[torch.Tensor, Entry]]


def match(
    caller: str, targets: Sequence[Target], entries: Mapping[str, Entry], path: Any, strict: bool
) -> tuple[Pairs, list[str], list[str]]:
    """Which entry each tensor is to be filled from, and which names either side lacks; ValueError for what does not fit."""
    pairs: Pairs = []
    missing: list[str] = []
    known: set[str] = set()
    wrong: list[str] = []
    for target in targets:
        known.update(target.names)
        there = [name for name in target.names if name in entries]
        if not there:
            missing += target.names
            continue
        for name in there:
            wrong += _misfits(name, target.tensor, entries[name])
        pairs.append((target.tensor, entries[there[-1]]))  # the last of several, as load_state_dict has it
    unexpected = [name for name in entries if name not in known]
    if strict:
        files = sorted({entry.path for entry in entries.values()}) or [str(path)]
        wrong += _missing(missing, unexpected, files) + _unexpected(unexpected, missing, entries)
    refuse(caller, path, wrong)
    return pairs, missing, unexpected


def refuse(caller: str, path: Any, wrong: Sequence[str]) -> None:
    """ValueError of everything that is ``wrong``, if anything is."""
    if wrong:
        more = f"\n  and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise ValueError(f"{caller}(): {path} does not fit:\n  " + "\n  ".join(wrong[:LISTED]) + more)


def _misfits(name: str, tensor: torch.Tensor, entry: Entry) -> Iterator[str]:
    if tensor.is_meta:
        yield f"{name!r} of the module is on the meta device, where nothing can be filled; dtorch.distribute_module places it"
    if entry.shape != tensor.shape:
        yield f"{entry.name!r} has shape {tuple(entry.shape)} in {entry.path} and {tuple(tensor.shape)} in the module"
    if not torch.can_cast(entry.dtype, tensor.dtype):
        yield f"{entry.name!r} is {entry.dtype} in {entry.path}, which does not convert to {tensor.dtype}"


def _missing(missing: Sequence[str], unexpected: Sequence[str], files: Sequence[str]) -> list[str]:
    where = files[0] if len(files) == 1 else f"any of {len(files)} files, {files[0]} the first"
    return [f"{name!r} of the module is missing in {where}{_near(name, unexpected)}" for name in missing]


def _unexpected(unexpected: Sequence[str], missing: Sequence[str], entries: Mapping[str, Entry]) -> list[str]:
    return [
        f"{entries[name].name!r} in {entries[name].path} is no tensor of the module{_near(name, missing)}"
        for name in unexpected
    ]


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; {near[0]!r} is near" if near else ""


@hints.takes
def save(
    module_or_state_dict: torch.nn.Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str | None = None,
    progress: bool = True,
) -> transfers.Moved:
    """Write the tensors of a module, or of a dict, to safetensors; each worker writes its part, and the target changes all at once.

    Everything is written beside the target, brought to the disk, and renamed: whoever looks sees all of the old or all of the new. What
    a call that was interrupted has left is never read, and is removed by the next. A tied tensor of a module is written once, under
    the first of its names. Pending sums are completed.

    Args:
        module_or_state_dict: tensors may be placed, uncommitted or plain.
        path: a file, if it ends in ``.safetensors``; else a folder for ``model.safetensors``, or several files and an index. Other
            files in the folder (``config.json``) stay.
        max_shard_size: the most bytes of tensors in one file of a folder: a number or ``"5GB"``, which is the default. A tensor that
            is larger has a file to itself.
        progress: show a bar of bytes, where standard error is a terminal.

    Returns:
        The bytes that each device has written; ``"client"`` for plain and uncommitted tensors.

    Raises:
        TypeError: something that safetensors cannot hold. It is named.
        ValueError: a tensor on the meta device; a name that the format cannot hold; ``max_shard_size`` for a single file, or none
            that it understands.
        OSError: no space, no permission. The target is what it was then.
        RemoteError: a worker could not write, or a tensor has no value because an op failed.

    Example::

        >>> layer = distribute_module(torch.nn.Linear(4, 2), DeviceMesh("cpu", [0, 1]), {"*": [Shard(0)]})
        >>> folder = tempfile.mkdtemp()
        >>> _ = save(layer, folder)
        >>> sorted(safetensors.torch.load_file(os.path.join(folder, "model.safetensors")))
        ['bias', 'weight']
    """
    tensors = checked(named_tensors("save", module_or_state_dict))
    limit = _size(DEFAULT_SHARD_SIZE if max_shard_size is None else max_shard_size)
    target = Path(named_path("save", path))
    if target.suffix == WEIGHTS and not target.is_dir():
        if max_shard_size is not None:
            raise ValueError(f"save(): {target} is a single file; max_shard_size= is for a folder")
        with replacing_file(target) as partial:
            return _write({partial: tensors}, progress)
    with replacing_folder(target, belongs) as folder:
        return write_folder(folder, tensors, limit, progress)


def named_tensors(caller: str, source: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module, tied ones once, or of a dict."""
    if isinstance(source, torch.nn.Module):
        found: dict[str, Any] = {}
        seen = set()
        for name, tensor in source.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
        return found
    if not isinstance(source, Mapping):
        raise TypeError(
            f"{caller}(): argument 'module_or_state_dict' must be a torch.nn.Module or a dict of tensors, not {type(source).__name__}"
        )
    for name in source:
        if not isinstance(name, str):
            raise TypeError(f"{caller}(): the names of tensors must be str, got {name!r}")
    return dict(source)


def checked(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Raise for what the format cannot hold."""
    for name, tensor in tensors.items():
        if name == formats.METADATA or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ValueError(f"save(): safetensors cannot hold a tensor of the name {name!r}")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"save(): {name!r} is a {type(tensor).__name__}, and safetensors hold only tensors; dtorch.io.save_state keeps more"
            )
        if tensor.layout != torch.strided or tensor.is_nested or torch.nn.parameter.is_lazy(tensor):
            raise TypeError(f"save(): {name!r} is no dense tensor with values")
        if tensor.dtype not in formats.NAMES:
            raise TypeError(f"save(): {name!r} is {tensor.dtype}, which safetensors cannot hold")
        if tensor.is_meta:
            raise ValueError(f"save(): {name!r} is on the meta device and has no values")
    return dict(tensors)


def belongs(name: str) -> bool:
    """Whether a file of a folder is part of the checkpoint in it."""
    return re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", name) is not None


def write_folder(
    folder: Path, tensors: Mapping[str, torch.Tensor], limit: int, progress: bool, stem: str = "model"
) -> transfers.Moved:
    """Write tensors to ``{stem}.safetensors``, or to several files of at most ``limit`` bytes and their index."""
    shards = _shards(tensors, limit)
    if len(shards) == 1:
        return _write({folder / f"{stem}{WEIGHTS}": shards[0]}, progress)
    files = {folder / f"{stem}-{i:05}-of-{len(shards):05}{WEIGHTS}": shard for i, shard in enumerate(shards, 1)}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file.name for file, shard in files.items() for name in shard},
    }
    (folder / f"{stem}{INDEX}").write_text(json.dumps(index, indent=2) + "\n")
    return _write(files, progress)


def _shards(tensors: Mapping[str, torch.Tensor], limit: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def _write(files: Mapping[Path, Mapping[str, torch.Tensor]], progress: bool) -> transfers.Moved:
    starts: dict[str, int] = {}
    for path, tensors in files.items():
        beginning, positions, size = formats.header(tensors, {"format": "pt"})
        starts |= positions
        with open(path, "wb") as file:
            file.write(beginning)
            file.flush()
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk is told here, and not a bus error on a worker
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror}: {size:,} bytes are needed", str(path)) from error
    return transfers.write(files, starts, progress)


def _size(limit: int | str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", limit) if isinstance(limit, str) else None
    if found and found[2].upper() in _UNITS:
        limit = int(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f"save(): max_shard_size must be a number of bytes or such as '5GB', got {limit!r}")
    return limit


def _check_module(caller: str, module: Any) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"{caller}(): argument 'module' must be a torch.nn.Module, not {type(module).__name__}")
