"""``plan="auto"``: the tensor-parallel plan that a model brings with it, as Hugging Face models do.

Such a plan names modules and parameters (``model.layers.*.self_attn.q_proj``) and a style for each. Only where parameters go is taken
from it: what the styles say of activations, our ops find by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import REPLICATE, Placement, packed, shard
from .holdings import Held
from .plans import Plan, generic

log = logging.getLogger("dtorch")

TP = "tp"

#: Style → which dim of a matrix it splits, and which of a vector (a bias); None: not split. Names of transformers 4.50 to 5.24.
STYLES: dict[str, tuple[int | None, int | None]] = {
    "colwise": (-2, -1),
    "rowwise": (-1, None),
    "embedding_rowwise": (0, None),
    "embedding_colwise": (1, None),
    "packed_colwise": (-2, -1),
    "packed_rowwise": (-1, None),
    "grouped_gemm": (0, 0),
    **dict.fromkeys(
        (
            "all_reduce", "gather", "isolated", "local", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts",
            "replicate", "replicated_with_grad_allreduce", "sequence_parallel",
        ),
        (None, None),
    ),
}  # fmt: skip

#: How many matrices a packed style means: a gate and what goes through it.
PACKED = 2

#: What a style says of the activations around it.
PREFIXES, SUFFIXES = ("local_",), ("_rep", "_gather_output", "_split_input")


def auto_plan(module: torch.nn.Module, held: list[Held], mesh: DeviceMesh) -> tuple[Plan, list[str]]:
    """The model's own plan as one of ours, by parameter name, and what there is to report of it.

    Raises:
        ValueError: a model without a plan; a mesh of several axes of which none is called ``tp``, because none has a name.
    """
    styles = plan_of(module)
    axis = tp_axis(mesh)
    notes: dict[str, None] = {}  # ordered, and each once: layers are alike
    if axis is None and mesh.size() > 1:
        names = ", ".join(map(repr, mesh.mesh_dim_names or ()))
        notes[
            f"plan='auto' splits along an axis {TP!r}, and {mesh} has only {names}; the whole model is replicated on each of its "
            f"{mesh.size()} devices (name an axis {TP!r} in mesh_dim_names=, or give a dict of globs to placements)"
        ] = None
    plan: dict[str, list[Placement]] = {}
    used = set()
    for one in held:
        for name, (owner, attribute) in zip(one.names, one.owners, strict=True):
            key = _key(styles, generic(name))
            if key is None:
                continue
            used.add(key)
            pieces = 1 if axis is None else mesh.shape[axis]
            placement, note = _placement(module, one, name, owner, attribute, styles[key], pieces)
            if note:
                notes[f"{generic(name)}: {note}"] = None
            plan.setdefault(name, [placement if a == axis else REPLICATE for a in range(mesh.ndim)])
    for key in styles:
        if key not in used and STYLES.get(_plain_style(styles[key]), (None, None))[0] is not None:
            log.info(
                "distribute_module: the model's own plan has %r, which matches nothing in this %s",
                key,
                type(module).__name__,
            )
    return plan, list(notes)


def plan_of(module: torch.nn.Module) -> dict[str, str]:
    """The model's own plan: generic name of a module or parameter → style."""
    for found in (getattr(module, "tp_plan", None), getattr(module, "_tp_plan", None), _of_config(module)):
        if isinstance(found, Mapping) and found:
            return {generic(key): style for key, style in found.items()}
    inner = [name for name, part in module.named_modules() if name and _of_config(part)]
    hint = f"; its part {inner[0]!r} has one" if inner else ""
    raise ValueError(
        f"distribute_module(): plan='auto', but {type(module).__name__} has no tensor-parallel plan of its own (no tp_plan, _tp_plan or "
        f"config.base_model_tp_plan){hint}; give a dict of parameter-name globs to placements"
    )


def _of_config(module: torch.nn.Module) -> Any:
    return getattr(getattr(module, "config", None), "base_model_tp_plan", None)


def tp_axis(mesh: DeviceMesh) -> int | None:
    """The axis that a tensor-parallel plan is for; None: the mesh has others only, and the plan replicates."""
    if mesh.mesh_dim_names is None and mesh.ndim > 1:
        raise ValueError(
            f"distribute_module(): plan='auto' needs to know which axis of {mesh} is 'tp'; give mesh_dim_names="
        )
    return 0 if mesh.mesh_dim_names is None else mesh.dim_name_index(TP)


def _key(styles: dict[str, str], name: str) -> str | None:
    """The entry for a parameter: its own before its module's."""
    return next((key for key in (name, name.rpartition(".")[0]) if key in styles), None)


def _plain_style(style: str) -> str:
    for prefix in PREFIXES:
        if style.removeprefix(prefix) in STYLES:
            style = style.removeprefix(prefix)
    for suffix in SUFFIXES:
        style = style.removesuffix(suffix)
    return style


def _placement(
    module: torch.nn.Module, one: Held, name: str, owner: torch.nn.Module, attribute: str, style: str, pieces: int
) -> tuple[Placement, str]:
    """How a style splits a tensor, and a word on it where it is not what the plan says."""
    plain = _plain_style(style)
    if isinstance(owner, torch.nn.Embedding) and f"embedding_{plain}" in STYLES:
        plain = f"embedding_{plain}"
    if plain not in STYLES:
        return REPLICATE, f"the style {style!r} is not known here; replicated"
    dim = STYLES[plain][0 if one.tensor.ndim > 1 else 1]
    if one.tensor.ndim == 0 or dim is None:
        return REPLICATE, ""
    dim %= one.tensor.ndim
    if style == "colwise" and pieces > 1:
        heads = _heads(module, name, one.tensor.shape[dim])
        if heads is not None and heads % pieces:
            return REPLICATE, f"its {heads} heads do not divide over {TP}={pieces}; replicated, so that no head is cut"
    if plain.startswith("packed") and pieces > 1:
        if one.tensor.shape[dim] % (PACKED * pieces) == 0:
            return packed(dim, PACKED), ""
        return (
            shard(dim),
            f"{PACKED} matrices packed in one ({style}) whose rows do not divide over {TP}={pieces}; split as one, so that activations "
            "move where the model takes them apart",
        )
    return shard(dim), ""


def _heads(module: torch.nn.Module, name: str, size: int) -> int | None:
    """How many heads a projection makes, if it belongs to something with heads."""
    around = name.rpartition(".")[0].rpartition(".")[0]
    head_dim = getattr(module.get_submodule(around), "head_dim", None)
    if isinstance(head_dim, int) and head_dim > 0 and size % head_dim == 0:
        return size // head_dim
    return None
