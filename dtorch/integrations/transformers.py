"""Hugging Face transformers: unmodified models, built without memory here, placed, and loaded by the workers.

For transformers 5. What is private there and used here: of its models ``_from_config``, ``_get_dtype_plan``, ``_init_weights``,
``_keys_to_ignore_on_load_missing`` and ``…_unexpected``, ``_weight_conversions`` and ``all_tied_weights_keys``; and the modules
``conversion_mapping`` and ``core_model_loading`` (tests: 5.24).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import creation
from ..errors import DTorchError
from ..io import save, transfers
from ..io.checkpoints import Entry, entries_of, named_path
from ..io.weights import Target, match, refuse, targets_of
from ..mesh import DeviceMesh
from ..placement import REPLICATE, shard
from ..tensor import Tensor

log = logging.getLogger("dtorch")


def from_pretrained(
    path: str | os.PathLike[str],
    mesh: DeviceMesh,
    plan: Any = "auto",
    dtype: torch.dtype | str | None = None,
    *,
    progress: bool = True,
) -> Any:
    """A model of transformers from a folder, on a mesh: what ``AutoModel….from_pretrained(path, dtype=dtype)`` makes, without its memory.

    The class is the one that ``config.json`` names, and it is not changed. This process makes no parameters: workers get empty ones
    and each reads the parts it holds; what transformers fuses of several tensors (the experts of a mixture) is put together on the mesh.

    Args:
        path: a folder as ``save_pretrained`` writes it, with safetensors.
        mesh: where to.
        plan: as for `distribute_module`: ``"auto"``, or globs of parameter names to placements; ``{}`` replicates.
        dtype: of the parameters, as transformers takes it; None and ``"auto"``: that of the checkpoint. Weights are converted while they
            are read.
        progress: show a bar of bytes, where standard error is a terminal.

    Returns:
        The model, in evaluation mode, with its generation config. Its ``save_pretrained`` works.

    Raises:
        FileNotFoundError: no such folder, or a file of it is missing.
        ValueError: a class that transformers lacks, quantised weights; a plan, file or tensor that does not fit the model.
        DTorchError: transformers is not installed.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> model = from_pretrained("Qwen3-0.6B", mesh)  # doctest: +SKIP
        >>> model.generate(input_ids)  # doctest: +SKIP
    """
    from ..nn import distribute_module

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"from_pretrained(): argument 'mesh' must be a DeviceMesh, not {type(mesh).__name__}")
    folder = Path(os.path.abspath(named_path("from_pretrained", path)))
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"from_pretrained(): there is no config.json in {folder}; huggingface_hub.snapshot_download(name) brings a model to a folder"
        )
    library = _library()
    config = library.AutoConfig.from_pretrained(folder)
    entries = entries_of(folder)
    model = _build(_class_of(library, config, folder), config, _dtype_of(dtype, config, entries))
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = library.GenerationConfig.from_pretrained(folder)
    weights = _weights_of(model, entries)
    _make_what_is_not_saved(model, weights)
    distribute_module(model, mesh, plan)
    _fill(model, mesh, weights, folder, progress)
    return model.eval()


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise DTorchError("transformers is not installed: pip install 'dtorch[transformers]'") from error
    return transformers


def _class_of(library: Any, config: Any, folder: Path) -> Any:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"from_pretrained(): the weights in {folder} are quantised, which dtorch does not support")
    names = config.architectures or []
    found = getattr(library, names[0], None) if names else None
    if found is None:
        said = f"the class {names[0]}, which transformers lacks" if names else "no class"
        raise ValueError(
            f"from_pretrained(): config.json in {folder} names {said}; build the model yourself, then "
            "dtorch.distribute_module(model, mesh, plan) and dtorch.io.load(model, path)"
        )
    return found


def _dtype_of(dtype: Any, config: Any, entries: Mapping[str, Entry]) -> torch.dtype:
    if dtype in (None, "auto"):
        stored = (entry.dtype for entry in entries.values() if entry.dtype.is_floating_point)
        dtype = getattr(config, "dtype", None) or next(stored, torch.get_default_dtype())
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"from_pretrained(): dtype must be a floating dtype, its name, 'auto' or None, got {dtype!r}")
    return found


# -- building --------------------------------------------------------------------------------------------------------------


def _build(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """The model with its parameters on the meta device, and its buffers, which no checkpoint may have, real."""
    with _parameters_on_meta():
        model = kind._from_config(config, dtype=dtype)
    for pattern, wider in model._get_dtype_plan(dtype).items():
        glob = re.compile(pattern.replace("*", ".*"))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if glob.search(name) and tensor.is_floating_point():
                tensor.data = tensor.data.to(wider)
    return model


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, a parameter that a module registers goes to the meta device. What it was made of is memory that nobody has touched."""

    def to_meta(module: torch.nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        moved = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        return moved

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


# -- loading ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fusion:
    """Tensors of the checkpoint that make others of the model: transformers' own converter, and what it converts."""

    first: str
    converter: Any
    #: For each source: its pattern in the converter, its name in the checkpoint, its entry.
    sources: list[tuple[str, str, Entry]]

    def __str__(self) -> str:
        shown = [f"{entry.name!r} in {entry.path}" for _, _, entry in self.sources[:2]]
        more = len(self.sources) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more else "")

    def convert(self, model: Any, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the converter makes of ``tensors``, by name in the model."""
        converter = copy.deepcopy(self.converter)
        for (pattern, name, _), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, name, pattern, tensor)
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def read(self, model: Any, mesh: DeviceMesh, tally: Any) -> list[torch.Tensor]:
        """The sources, each device a part of each."""
        dtype = model.get_parameter_or_buffer(self.first).dtype
        tensors = []
        for _, _, entry in self.sources:
            where = [shard(0) if entry.shape else REPLICATE] * mesh.ndim
            made = creation.empty(entry.shape, dtype=dtype, device_mesh=mesh, placements=where)
            transfers.read_one(made, entry, tally)
            tensors.append(made)
        return tensors


@dataclass(frozen=True, slots=True)
class _Weights:
    """A checkpoint as a model has it: its tensors by their names in the model, and what is made of several or of parts."""

    named: dict[str, Entry]
    fusions: list[_Fusion]
    #: The shape of what fusions make, by name, with the sources.
    made: dict[str, tuple[torch.Size, _Fusion]]

    def has_any(self, names: Sequence[str]) -> bool:
        return any(name in self.named or name in self.made for name in names)


def _fill(model: Any, mesh: DeviceMesh, weights: _Weights, folder: Path, progress: bool) -> None:
    """Bring the weights to a placed model. Everything is checked before anything is read."""
    wrong = []
    for name, (shape, fusion) in weights.made.items():
        expected = model.get_parameter_or_buffer(name).shape
        if shape != expected:
            wrong.append(f"{name!r} has shape {tuple(expected)} in the model and {tuple(shape)} as made of {fusion}")
    direct = [target for target in targets_of(model) if weights.made.keys().isdisjoint(target.names)]
    pairs, missing, unexpected = match("from_pretrained", direct, weights.named, folder, strict=False)
    wrong += [f"{name!r} of the model is missing" for name in _filtered(missing, model._keys_to_ignore_on_load_missing)]
    refuse("from_pretrained", folder, wrong)
    unexpected = _filtered(unexpected, {*(model._keys_to_ignore_on_load_unexpected or ()), *FORMER_BUFFERS})
    if unexpected:
        log.warning("from_pretrained: %s holds tensors that the model lacks: %s", folder, ", ".join(unexpected))
    total = sum(entry.nbytes for _, entry in pairs)
    total += sum(entry.nbytes for fusion in weights.fusions for _, _, entry in fusion.sources)
    with transfers.Tally("Loading", total, progress) as tally, torch.no_grad():
        for tensor, entry in sorted(pairs, key=lambda pair: pair[1].path):
            transfers.read_one(tensor, entry, tally)
        for fusion in weights.fusions:
            for name, value in fusion.convert(model, fusion.read(model, mesh, tally)).items():
                model.get_parameter_or_buffer(name).copy_(value)
        tally.finish()
    _untie(model, direct, weights.named)


#: Buffers that older checkpoints hold and models make themselves now; transformers passes over them, too.
FORMER_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")


def _filtered(names: Sequence[str], ignored: Any) -> list[str]:
    """The names that none of the patterns occurs in."""
    return [name for name in names if not any(re.search(pattern, name) for pattern in ignored or ())]


def _weights_of(model: Any, entries: Mapping[str, Entry]) -> _Weights:
    """Name, fuse and split the checkpoint's tensors as transformers does."""
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    mapping = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state = model.state_dict()
    named: dict[str, Entry] = {}
    fusions: dict[str, _Fusion] = {}
    for name in sorted(entries, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        if pattern is None or renamed not in state:
            named[renamed] = entries[name]
        else:
            fusion = fusions.setdefault(renamed, _Fusion(renamed, by_pattern[pattern], []))
            fusion.sources.append((pattern, name, entries[name]))
    model._weight_conversions = [entry for entry in mapping if entry.was_used()]  # which save_pretrained reverts
    made: dict[str, tuple[torch.Size, _Fusion]] = {}
    for fusion in fusions.values():
        metas = [torch.empty(entry.shape, dtype=entry.dtype, device="meta") for _, _, entry in fusion.sources]
        try:
            converted = fusion.convert(model, metas)
        except Exception as error:
            raise ValueError(f"from_pretrained(): {fusion.first!r} cannot be made of {fusion}: {error}") from error
        made |= {name: (value.shape, fusion) for name, value in converted.items()}
    return _Weights(named, list(fusions.values()), made)


def _make_what_is_not_saved(model: Any, weights: _Weights) -> None:
    """Parameters that checkpoints leave out on purpose, tables of sines, are made as the model makes them."""
    ignored = model._keys_to_ignore_on_load_missing
    for target in targets_of(model):
        if weights.has_any(target.names) or not target.tensor.is_meta or _filtered(target.names, ignored):
            continue
        for name in target.names:
            path, _, attribute = name.rpartition(".")
            owner = model.get_submodule(path)
            fresh = torch.empty(target.tensor.shape, dtype=target.tensor.dtype, device="cpu")
            setattr(owner, attribute, torch.nn.Parameter(fresh, target.tensor.requires_grad))
            _model_around(model, path)._init_weights(owner)


def _model_around(model: Any, path: str) -> Any:
    """The innermost model of transformers that a submodule is part of; it knows how to initialise it."""
    from transformers import PreTrainedModel

    while path:
        path = path.rpartition(".")[0]
        found = model.get_submodule(path)
        if isinstance(found, PreTrainedModel):
            return found
    return model


def _untie(model: Any, targets: Sequence[Target], named: Mapping[str, Entry]) -> None:
    """Weights that the config ties though the checkpoint has both, with other values, are two, as transformers has it."""
    for target in targets:
        there = [name for name in target.names if name in named]
        for name in there[:-1]:  # the last was read
            other = torch.empty_like(target.tensor)
            transfers.read([(other, named[name])], progress=False)
            if not torch.equal(other, target.tensor):
                log.warning(
                    "from_pretrained: %r and %r are tied by the config and differ in the checkpoint; untied",
                    name,
                    there[-1],
                )
                owner, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(owner), attribute, torch.nn.Parameter(other, target.tensor.requires_grad))
                getattr(model, "all_tied_weights_keys", {}).pop(name, None)
                getattr(model, "all_tied_weights_keys", {}).pop(there[-1], None)


# -- saving ----------------------------------------------------------------------------------------------------------------


def keep_saving(module: torch.nn.Module) -> None:
    """Have ``save_pretrained`` of models of transformers work on placed tensors, of which it would read the memory.

    In their common class, once, where ``module`` has one: a method of the model itself would be in a cycle with it, and in its pickles.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not any(isinstance(part, modeling.PreTrainedModel) for part in module.modules()):
        return
    original = modeling.PreTrainedModel.save_pretrained
    if not hasattr(original, "saves_placed"):
        modeling.PreTrainedModel.save_pretrained = _saving(original)


def _saving(original: Any) -> Any:
    """``save_pretrained``, which is given plain tensors for placed ones: views of a file that the workers have written."""

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(self, save_directory, *args, **kwargs)
        state = call.arguments.get("state_dict")
        state = self.state_dict() if state is None else state
        if not any(isinstance(value, Tensor) for value in state.values()):
            return original(self, save_directory, *args, **kwargs)
        beside = Path(os.path.abspath(os.fspath(save_directory))).parent
        beside.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".dtorch-", dir=beside) as folder:
            call.arguments["state_dict"] = _plain(state, Path(folder) / "state.safetensors")
            return original(*call.args, **call.kwargs)

    save_pretrained.saves_placed = True  # type: ignore[attr-defined]
    return save_pretrained


def _plain(state: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """``state`` with plain tensors over the memory of ``file``; what is one tensor stays one."""
    placed = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    names: dict[Any, str] = {}
    of = {name: names.setdefault(_identity(tensor), name) for name, tensor in placed.items()}
    save({name: placed[name] for name in names.values()}, file, progress=False)
    entries = entries_of(file)
    plain = {name: entries[name].read() for name in names.values()}
    return {name: plain[of[name]] if name in of else value for name, value in state.items()}


def _identity(tensor: Tensor) -> Any:
    return id(tensor) if tensor._spec is None else (tensor._value.id, tensor._spec)
