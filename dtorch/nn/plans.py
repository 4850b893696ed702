"""A plan says where the tensors of a module go: globs of their names → placements. Pure: it looks at names, shapes and the mesh."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from ..mesh import DeviceMesh
from ..placement import REPLICATE, Placement, PlacementList, is_partial, normalize
from ..sharding.spec import Spec, intern_mesh
from .holdings import Held

Where = Sequence[Placement] | Mapping[str, Placement]
Plan = Mapping[str, Where]

#: The axes of the usual strategies. A plan may name them for meshes that lack them; any other name must be on the mesh.
USUAL_AXES = ("dp", "tp", "pp", "ulysses_cp", "ulysess_cp", "ring_cp")


def resolve(held: list[Held], mesh: DeviceMesh, plan: Plan) -> tuple[list[PlacementList], list[str]]:
    """The placements of each tensor, and what there is to report.

    Raises:
        TypeError, ValueError: a glob that matches nothing; placements that are impossible for what it matches.
    """
    chosen: dict[int, tuple[str, PlacementList]] = {}
    unmatched, notes = [], []
    for glob, where in plan.items():
        if not isinstance(glob, str):
            raise TypeError(f"distribute_module(): the plan's keys must be globs of parameter names, got {glob!r}")
        found = matches(glob, held)
        if not found:
            unmatched.append(glob)
        for one in found:
            placements = placements_of(glob, where, one, mesh)
            before = chosen.setdefault(id(one), (glob, placements))
            if before[1] != placements and not any(
                fnmatchcase(n, before[0]) and fnmatchcase(n, glob) for n in one.names
            ):
                notes.append(
                    f"{' = '.join(one.names)} is one tied tensor: {before[0]!r} places it, {glob!r} is not followed"
                )
    if unmatched:
        raise ValueError(_unmatched(unmatched, held))
    whole = PlacementList((REPLICATE,) * mesh.ndim)
    return [chosen[id(one)][1] if id(one) in chosen else whole for one in held], notes


def matches(glob: str, held: list[Held]) -> list[Held]:
    """The parameters with a name that matches; if there is none, the buffers.

    So that ``"*"`` says how to split parameters, and leaves tables of positions and statistics whole.
    """
    found = [one for one in held if any(fnmatchcase(name, glob) for name in one.names)]
    parameters = [one for one in found if one.is_parameter]
    return parameters or found


def placements_of(glob: str, where: Where, one: Held, mesh: DeviceMesh) -> PlacementList:
    """What the plan says for one tensor, checked. A tensor without dims is replicated, whatever it says."""
    told = f"distribute_module(): plan[{glob!r}] for {one.name!r} of shape {tuple(one.tensor.shape)}"
    if isinstance(where, Mapping):
        listed = _by_axis(told, where, mesh)
    elif isinstance(where, (list, tuple)):
        listed = list(where)
        if len(listed) > mesh.ndim:
            raise ValueError(
                f"{told}: the mesh is too small: it has {mesh.ndim} axes, the plan {len(listed)}: {listed}; {mesh}"
            )
    else:
        raise TypeError(
            f"{told}: expected a list of placements, one per mesh axis, or a dict of axis name to placement, got {where!r}"
        )
    if one.tensor.ndim == 0 and all(isinstance(p, Placement) for p in listed):
        return PlacementList((REPLICATE,) * mesh.ndim)
    try:
        found = normalize(listed, mesh.ndim, one.tensor.ndim)
        Spec.of(intern_mesh(mesh), found, one.tensor.shape, None, one.tensor.dtype)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{told}: {error}") from None
    if any(is_partial(p) for p in found):
        raise ValueError(f"{told}: a parameter cannot be a pending sum; use Shard(dim) or Replicate(), got {found}")
    return found


def _by_axis(told: str, where: Mapping[str, Placement], mesh: DeviceMesh) -> list[Placement]:
    names = mesh.mesh_dim_names
    if names is None and mesh.is_distributed:
        raise ValueError(f"{told}: it goes by axis name, and {mesh} has no axis names; give mesh_dim_names= or a list")
    names = names or ()  # one device, as ``unbind`` leaves of a mesh of one axis: there is nothing to name
    for axis in where:
        if axis not in names and axis not in USUAL_AXES:
            raise ValueError(
                f"{told}: the mesh has no axis named {axis!r}; its axes are {list(names)}{_near(str(axis), names)}"
            )
    return [where.get(name, REPLICATE) for name in names] or [REPLICATE] * mesh.ndim


def _unmatched(globs: list[str], held: list[Held]) -> str:
    names = [name for one in held for name in one.names]
    if not names:
        return f"distribute_module(): the module has no parameters or buffers, so nothing matches {globs}"
    lines = [
        f"distribute_module(): no parameter or buffer matches {glob!r}{_candidates(glob, names)}" for glob in globs
    ]
    return "\n".join(lines)


def _candidates(glob: str, names: list[str]) -> str:
    """Names that were meant, perhaps: the tensors of a module that the glob names, and what is spelt like it."""
    general = list(dict.fromkeys([*map(generic, names), *names]))
    inside = [name for name in general if fnmatchcase(name, glob + ".*")]
    if inside:
        return f"; it names a module; its tensors are {', '.join(map(repr, inside[:4]))}"
    return _near(generic(glob), general) or f"; its tensors are {', '.join(map(repr, general[:8]))}"


def _near(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
    return f"; near misses: {', '.join(map(repr, close))}" if close else ""


def generic(name: str) -> str:
    """``layers.3.mlp.weight`` as ``layers.*.mlp.weight``: one name for the same tensor of every layer."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)
