"""The whole state of a training run: modules, optimizers, schedulers and random numbers, each worker's part its own."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from .. import creation
from ..client import host
from . import transfers, trees
from .atomic import replacing_folder
from .checkpoints import Entry, entries_of, named_path
from .weights import Pairs, Target, checked, match, targets_of, write_folder

#: The file of all that is no tensor, and what the tensors' files are called.
STATE, STEM = "state.json", "state"
FORMAT = "dtorch training state 1"
SHARD_SIZE = 5 * 10**9


def save_state(path: str | os.PathLike[str], **objects: Any) -> None:
    """Save the state of a training run to a folder, which changes all at once; nothing is gathered.

    Args:
        path: the folder. Other files in it stay.
        objects: by name: modules; optimizers, schedulers and anything else with ``state_dict()`` and ``load_state_dict()``;
            ``torch.Generator``; tensors; numbers, strings and lists, tuples, sets and dicts of all these. The states of torch's, Python's
            and numpy's random numbers are always part of it.

    Raises:
        TypeError: something that cannot be kept without a pickle; it says where it is.
        OSError, RemoteError: as `save`. The folder is what it was then.

    Example::

        >>> layer = distribute_module(torch.nn.Linear(4, 2), DeviceMesh("cpu", [0, 1]), {"*": [Shard(0)]})
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> path = os.path.join(tempfile.mkdtemp(), "step10")
        >>> save_state(path, model=layer, optimizer=optimizer, step=10)
        >>> load_state(path, model=layer, optimizer=optimizer)
        {'step': 10}
    """
    writer = trees.Writer()
    kept = {}
    for name, found in objects.items():
        kind = _kind_of(found)
        kept[name] = {"kind": kind, "state": writer.write(KINDS[kind].state(found), (name,))}
    document = {"format": FORMAT, "objects": kept, "random": writer.write(_random_state(), ("random",))}
    tensors = checked(writer.tensors)
    with replacing_folder(named_path("save_state", path), _belongs) as folder:
        (folder / STATE).write_text(json.dumps(document))
        write_folder(folder, tensors, SHARD_SIZE, progress=False, stem=STEM)


def load_state(path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Bring objects, and random numbers, to the state that `save_state` saved: training goes on as if it had not stopped.

    Meshes and placements are those of the objects given, whatever they were when the state was saved: modules and tensors are filled in
    place, the state of an optimizer goes where its parameters are. Each worker reads the parts it holds.

    Args:
        path: the folder.
        objects: by the names that they were saved under. What was saved and is not given is left alone.

    Returns:
        The numbers, strings, lists, dicts that were saved, by name. A tensor in them is uncommitted if it lived on workers, else plain.

    Raises:
        FileNotFoundError: no such folder, or a file of it is missing.
        ValueError: a name that was not saved, an object of another kind, a module or tensor of another shape, a damaged file: nothing has
            been changed then. What ``load_state_dict`` of an optimizer refuses, too.
        RemoteError: as `load`.

    Example::

        >>> path = os.path.join(tempfile.mkdtemp(), "state")
        >>> save_state(path, x=ones(4, device_mesh=DeviceMesh("cpu", [0, 1])))
        >>> x = zeros(4, device_mesh=DeviceMesh("cpu", [0, 1, 2]), placements=[Shard(0)])
        >>> _ = load_state(path, x=x)
        >>> x.sum().item()
        4.0
    """
    folder = Path(os.path.abspath(named_path("load_state", path)))
    document = _document(folder)
    entries = entries_of(folder, STEM)
    saved = {
        name: _Saved(name, kept["kind"], kept["state"], entries, folder) for name, kept in document["objects"].items()
    }
    random_numbers = _Saved("random", "value", document["random"], entries, folder)
    for one in (*saved.values(), random_numbers):
        one.check()
    in_place: Pairs = []
    for name, found in objects.items():
        _check_given(name, found, saved, folder)
        targets = KINDS[saved[name].kind].targets(name, found)
        if targets:
            in_place += match("load_state", targets, saved[name].named_entries(), f"{name!r} in {folder}", True)[0]
    transfers.read(in_place, progress=False)
    for name, found in objects.items():
        KINDS[saved[name].kind].restore(found, saved[name])
    values = {name: one.read() for name, one in saved.items() if one.kind == "value"}
    _set_random_state(random_numbers.read())
    return values


Like = Callable[[trees.Path], "torch.Tensor | None"]


@dataclass(frozen=True, slots=True)
class _Saved:
    """One saved object."""

    name: str
    kind: str
    state: Any
    entries: Mapping[str, Entry]
    folder: Path

    def entry(self, reference: str) -> Entry:
        entry = self.entries.get(reference)
        if entry is None:
            raise ValueError(f"tensor {reference!r} of {self.name!r} is missing in the files of {self.folder}")
        return entry

    def check(self) -> None:
        """ValueError if it cannot be read, before anything is changed."""

        def found(path: trees.Path, reference: str, placed: bool) -> torch.Tensor:
            self.entry(reference)
            return torch.empty(0)

        try:
            data = trees.read(self.state, (), found)
            legal = KINDS[self.kind].legal(data)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.folder / STATE} is damaged: {self.name!r} cannot be read ({error})") from error
        if not legal:
            raise ValueError(f"{self.folder / STATE} is damaged: {self.name!r} is no state of {KINDS[self.kind].what}")

    def named_entries(self) -> dict[str, Entry]:
        """The entries of an object that is one tensor, or a dict of them and of other things."""
        if "tensor" in self.state:
            return {self.name: self.entry(self.state["tensor"])}
        ((_, items),) = self.state.items()
        return {key: self.entry(item["tensor"]) for key, item in items if isinstance(item, dict) and "tensor" in item}

    def read(self, like: Like = lambda path: None) -> Any:
        """The object's data; ``like(path)`` is the tensor that the one at ``path`` goes beside, if any."""
        pairs: Pairs = []

        def tensor_of(path: trees.Path, reference: str, placed: bool) -> torch.Tensor:
            entry = self.entry(reference)
            made = _empty(entry, placed, like(path))
            pairs.append((made, entry))
            return made

        found = trees.read(self.state, (), tensor_of)
        transfers.read(pairs, progress=False)
        return found


def _empty(entry: Entry, placed: bool, like: torch.Tensor | None) -> torch.Tensor:
    """A tensor for the values of ``entry``: on the mesh of ``like``, and with its placements if it has that shape."""
    alike = like is not None and like.shape == entry.shape
    if like is not None and transfers.is_placed(like) and (placed or alike):
        where = like.placements if alike else None  # type: ignore[attr-defined]
        return creation.empty(entry.shape, dtype=entry.dtype, device_mesh=like.device_mesh, placements=where)  # type: ignore[attr-defined]
    plain = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    return host.make(plain) if placed and like is None else plain


# -- kinds of objects ------------------------------------------------------------------------------------------------------


def _module_state(module: torch.nn.Module) -> dict[str, Any]:
    targets_of(module)  # raises for what cannot be filled again
    return dict(module.state_dict(keep_vars=True))


def _restore_module(module: torch.nn.Module, saved: _Saved) -> None:
    """Its tensors are there already; what `get_extra_state` gave is not."""
    ((kind, items),) = saved.state.items()
    others = [[key, item] for key, item in items if not (isinstance(item, dict) and "tensor" in item)]
    if others:
        extra = _Saved(saved.name, saved.kind, {kind: others}, saved.entries, saved.folder).read()
        module.load_state_dict(extra, strict=False)


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: _Saved) -> None:
    """What it keeps of a parameter goes where that is. A count of steps stays plain, as optimizers make it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def like(path: trees.Path) -> torch.Tensor | None:
        if len(path) < 3 or path[0] != "state" or path[2] == "step" or path[1] not in range(len(parameters)):
            return None
        return parameters[path[1]]

    optimizer.load_state_dict(saved.read(like))


def _restore_generator(generator: torch.Generator, saved: _Saved) -> None:
    generator.set_state(saved.read()[0])


def _restore_stateful(found: Any, saved: _Saved) -> None:
    now = found.state_dict()

    def like(path: trees.Path) -> torch.Tensor | None:
        item = now
        for step in path:
            try:
                item = item[step]
            except (KeyError, IndexError, TypeError):
                return None
        return item if isinstance(item, torch.Tensor) else None

    found.load_state_dict(saved.read(like))


def _nothing(found: Any, saved: _Saved) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Kind:
    """How objects of a kind are kept.

    ``targets``: those of its tensors that are filled in place, by name in its state. ``legal``: whether what a file says is such a state.
    """

    what: str
    holds: Callable[[Any], bool]
    state: Callable[[Any], Any]
    restore: Callable[[Any, _Saved], None]
    targets: Callable[[str, Any], list[Target]] = lambda name, found: []
    legal: Callable[[Any], bool] = lambda data: True


#: In the order of asking.
KINDS: dict[str, _Kind] = {
    "module": _Kind(
        "a module",
        lambda x: isinstance(x, torch.nn.Module),
        _module_state,
        _restore_module,
        lambda name, x: targets_of(x),
        lambda data: isinstance(data, dict) and all(isinstance(name, str) for name in data),
    ),
    "optimizer": _Kind(
        "an optimizer", lambda x: isinstance(x, torch.optim.Optimizer), lambda x: x.state_dict(), _restore_optimizer
    ),
    "tensor": _Kind(
        "a tensor",
        lambda x: isinstance(x, torch.Tensor),
        lambda x: x,
        _nothing,
        lambda name, x: [Target(x, [name])],
        lambda data: isinstance(data, torch.Tensor),
    ),
    "generator": _Kind(
        "a torch.Generator",
        lambda x: isinstance(x, torch.Generator),
        lambda x: [x.get_state()],
        _restore_generator,
        legal=lambda data: isinstance(data, list) and len(data) == 1 and isinstance(data[0], torch.Tensor),
    ),
    "stateful": _Kind(
        "an object with a state_dict",
        lambda x: hasattr(x, "state_dict") and hasattr(x, "load_state_dict"),
        lambda x: x.state_dict(),
        _restore_stateful,
    ),
    "value": _Kind("a value", lambda x: True, lambda x: x, _nothing),
}


def _kind_of(found: Any) -> str:
    return next(name for name, kind in KINDS.items() if kind.holds(found))


def _check_given(name: str, found: Any, saved: Mapping[str, _Saved], folder: Path) -> None:
    if name not in saved:
        raise ValueError(
            f"load_state(): {name!r} was not saved in {folder}; there are {', '.join(map(repr, saved)) or 'none'}"
        )
    kind = saved[name].kind
    if kind == "value":
        raise ValueError(f"load_state(): {name!r} is a value, which load_state returns; do not give it")
    if _kind_of(found) != kind:
        raise ValueError(
            f"load_state(): {name!r} was saved as {KINDS[kind].what} in {folder}, and a {type(found).__name__} was given"
        )


# -- random numbers --------------------------------------------------------------------------------------------------------


def _random_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy.random.get_state()}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])


# -- files -----------------------------------------------------------------------------------------------------------------


def _belongs(name: str) -> bool:
    return name == STATE or re.fullmatch(r"state(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", name) is not None


def _document(folder: Path) -> dict[str, Any]:
    file = folder / STATE
    if not file.is_file():
        raise FileNotFoundError(f"there is no {STATE} in {folder}; save_state writes one")
    try:
        document = json.loads(file.read_text())
        legal = document["format"] == FORMAT and {"torch", "python", "numpy"} <= {
            key for key, _ in document["random"]["dict"]
        }
        legal = legal and all(kept["kind"] in KINDS and "state" in kept for kept in document["objects"].values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        legal = False
    if not legal:
        raise ValueError(f"{file} is damaged, or not of the format {FORMAT!r}")
    return document
