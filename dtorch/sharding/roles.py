"""What each axis of a mesh does in an attention over a split sequence: said by names or options, else chosen by bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ..placement import REPLICATE, PlacementList, boxed, is_shard
from ..program.ir import Roles
from .sequence import Sizes, wide
from .spec import Spec

SEQUENCE = 2
"""The dim of (batch, heads, sequence, features) that is split."""

#: What an axis of this name does when it splits the sequence.
BY_NAME = {"ulysses_cp": "ulysses", "ulysess_cp": "ulysses", "ring_cp": "ring"}


def sizes_of(query: Spec, key: Spec) -> Sizes:
    return Sizes(query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2])


def splits_sequence(spec: Spec) -> bool:
    """Whether several devices share the sequence of a (…, sequence, features) tensor."""
    dim = spec.ndim - 2
    return any(is_shard(p) and p.dim == dim and n > 1 for p, n in zip(spec.placements, spec.mesh.shape, strict=True))  # type: ignore[attr-defined]


def whole_features(spec: Spec) -> Spec:
    """``spec`` with whole features and no pending sum, as attention takes and gives it."""
    return spec.with_placements(
        PlacementList(
            REPLICATE if is_shard(p) and p.dim > SEQUENCE else p  # type: ignore[attr-defined]
            for p in boxed(spec.placements)
        )
    )


def is_asked_for(specs: Sequence[Spec], insisted: Mapping[int, str]) -> bool:
    """Whether each axis that splits the sequence of one of q, k and v says by its name, or is told, what to do with it."""
    mesh = specs[0].mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return all(
        axis in insisted or names[axis] in BY_NAME
        for axis, size in enumerate(mesh.shape)
        if size > 1 and any(is_shard(p := s.placements[axis]) and p.dim == SEQUENCE for s in specs)  # type: ignore[attr-defined]
    )


def roles_of(query: Spec, key: Spec, value: Spec, insisted: Mapping[int, str]) -> Roles:
    """What each axis splits. One that splits the sequence is Ulysses or part of the ring: as ``insisted``, else by its name, else
    Ulysses where it splits the heads of queries and keys evenly, which moves least, else the ring.

    Raises:
        ValueError: ``insisted`` on Ulysses with fewer heads than devices.
    """
    mesh = query.mesh
    batch: list[int] = []
    heads: list[int] = []
    sequence: list[int] = []
    for axis, size in enumerate(mesh.shape):
        dims = [p.dim for s in (query, key, value) if is_shard(p := s.placements[axis]) and p.dim < 3]  # type: ignore[attr-defined]
        if size > 1 and dims:
            (batch, heads, sequence)[dims[0]].append(axis)
    ring: list[int] = []
    pieces = 1
    for axis in heads:
        pieces *= mesh.shape[axis]
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    for axis in sequence:
        more = pieces * mesh.shape[axis]
        few = query.shape[1] < more
        chosen = insisted.get(axis) or BY_NAME.get(names[axis])
        if chosen == "ulysses" and few:
            if axis in insisted:
                raise ValueError(
                    f"scaled_dot_product_attention: SdpaOption(ulysses_cp_dim={names[axis] or axis!r}) splits the heads over {more} "
                    f"devices, but query has {query.shape[1]} heads; use ring_cp_dim, or a smaller axis"
                )
            chosen = "ring"
        if chosen is None:
            even = query.shape[1] % more == 0 and key.shape[1] % more == 0
            chosen = "ulysses" if even else "ring"
        if chosen == "ulysses":
            heads.append(axis)
            pieces = more
        else:
            ring.append(axis)
    return Roles(tuple(batch), tuple(heads), tuple(ring))


def cheapest(
    roles: Roles, query: Spec, key: Spec, value: Spec, insisted: Mapping[int, str], is_backward: bool
) -> Roles:
    """``roles``, or the ones by which keys and values stay where they are and the queries come to them: what brings a device fewer bytes.

    Few queries before many keys are a decoder with a split cache: all of them are no more than a device's share of the keys, so that no
    device comes to hold a whole sequence of many. Where somebody ``insisted`` on Ulysses it stays that.
    """
    mesh = query.mesh
    sequence = [
        axis
        for axis, size in enumerate(mesh.shape)
        if size > 1
        and is_shard(p := key.placements[axis])
        and p.dim == SEQUENCE  # type: ignore[attr-defined]
        and axis not in roles.batch
        and insisted.get(axis) != "ulysses"
    ]
    if not sequence or set(roles.ring) - set(sequence):
        return roles
    devices = math.prod(mesh.shape[axis] for axis in sequence)
    if query.shape[1] * query.shape[2] * devices > key.shape[1] * key.shape[2]:
        return roles
    heads = tuple(axis for axis in roles.heads if axis not in sequence)
    stay = Roles(roles.batch, heads, (), tuple(sequence))
    costs = [_received(one, query, key, value, sequence, is_backward) for one in (roles, stay)]
    return stay if costs[1] < costs[0] else roles


def _received(roles: Roles, query: Spec, key: Spec, value: Spec, sequence: Sequence[int], is_backward: bool) -> float:
    """About how many bytes a device receives, but for masks and a zigzag; the axes of ``sequence`` split the keys."""
    mesh, item, wider = query.mesh, query.dtype.itemsize, wide(query.dtype).itemsize

    def size(axes: Iterable[int]) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    batch, heads, queries, features = query.shape
    held = batch * heads / size((*roles.batch, *roles.heads)) * queries
    keys_held = batch * key.shape[1] / size((*roles.batch, *roles.heads)) * key.shape[2] * (features + value.shape[3])
    spread = size(axis for axis in sequence if is_shard(query.placements[axis]))
    if roles.keys:
        places = size(roles.keys)
        missing = held * (1 - 1 / spread)
        if is_backward:  # queries, outputs, their gradients; the gradients of the queries are summed
            return missing * (features + 2 * value.shape[3]) * item + held * features * item * (places - 1) / spread
        return missing * features * item + held * (value.shape[3] + 1) * wider * (places - 1)
    around = size(roles.ring)
    block = keys_held / around
    to_heads = 1 - 1 / size(axis for axis in sequence if axis in roles.heads)
    missing = held / around * to_heads * (features + value.shape[3]) if spread > 1 else 0.0
    if is_backward:
        return (
            (around - 1) * block * item
            + (around > 1) * around * block * wider
            + 2 * to_heads * (block + missing) * item
        )
    return (around - 1) * block * item + to_heads * (block + missing) * item
