"""Spec: all that planning ever looks at of a tensor."""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import REPLICATE, Placement, PlacementList, is_packed, is_partial, is_split


class Spec:
    """(mesh, placements, shape, stride, dtype) of a distributed tensor, global in every part.

    Interned: two specs that agree in every part are one object, so they are compared and hashed by identity. Make one with
    `Spec.of`. Placements must be normalised (`dtorch.placement.normalize`).
    """

    __slots__ = (
        "mesh",
        "placements",
        "shape",
        "stride",
        "dtype",
        "replicated",
        "has_partial",
        "has_packed",
        "nbytes",
        "local_nbytes",
        "pieces",
        "key",
        "handle",
        "kind",
        "__weakref__",
    )

    mesh: DeviceMesh
    placements: PlacementList
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    #: Every placement is Replicate.
    replicated: bool
    #: Some placement is Partial.
    has_partial: bool
    #: Some placement is PackedShard.
    has_packed: bool
    #: The bytes of the whole tensor.
    nbytes: int
    #: The bytes that one device holds of it, about.
    local_nbytes: int
    #: How many devices split it: a device holds one in so many elements.
    pieces: int
    #: What the client makes handles with (`dtorch.client.handles`), or None as yet.
    handle: tuple | None
    #: What forms of calls have of it (`dtorch.sharding.forms`), or None as yet.
    kind: Any

    @staticmethod
    def of(
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        stride: Sequence[int] | None,
        dtype: torch.dtype,
    ) -> Spec:
        """The one spec of these parts; no ``stride`` means contiguous."""
        shape = torch.Size(shape)
        stride = contiguous_stride(shape) if stride is None else tuple(stride)
        placements = placements if type(placements) is PlacementList else PlacementList(placements)
        key = (mesh, placements, shape, stride, dtype)
        found = _SPECS.get(key)
        if found is None:
            if dtype in _QUANTISED:
                raise TypeError(f"dtorch does not support quantised tensors ({dtype}): call this on x.to_torch()")
            found = object.__new__(Spec)
            found.mesh = _MESHES.setdefault(mesh, mesh)
            found.placements = placements
            found.shape = shape
            found.stride = stride
            found.dtype = dtype
            found.replicated = all(p is REPLICATE for p in placements)
            found.has_partial = any(is_partial(p) for p in placements)
            found.has_packed = any(map(is_packed, placements))
            found.nbytes = shape.numel() * dtype.itemsize
            found.pieces = math.prod([n for n, p in zip(mesh.shape, placements, strict=True) if is_split(p)])
            found.local_nbytes = found.nbytes // found.pieces
            found.key = key
            found.handle = found.kind = None
            if found.has_packed:
                _check_packed(found)
            found = _SPECS.setdefault(key, found)
        return found

    def resized(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> Spec:
        """The spec of a tensor of another size that is placed and laid out alike: `of`, in a fraction of its time."""
        size = torch.Size(shape)
        key = (self.mesh, self.placements, size, stride, self.dtype)
        found = _SPECS.get(key)
        if found is not None:
            return found
        if self.has_packed:
            return Spec.of(*key)
        found = object.__new__(Spec)
        found.mesh, found.placements, found.shape, found.stride, found.dtype = key
        found.replicated, found.has_partial, found.has_packed = self.replicated, self.has_partial, False
        found.pieces = self.pieces
        found.nbytes = math.prod(shape) * self.dtype.itemsize
        found.local_nbytes = found.nbytes // found.pieces
        found.key = key
        found.handle = None
        found.kind = self.kind
        return _SPECS.setdefault(key, found)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def with_placements(self, placements: Sequence[Placement]) -> Spec:
        """This tensor under other placements on the same mesh."""
        return Spec.of(self.mesh, placements, self.shape, self.stride, self.dtype)

    def replicate(self) -> Spec:
        """This tensor replicated over its mesh."""
        return self if self.replicated else self.with_placements(replicated(self.mesh))

    def shards(self, dim: int) -> int:
        """How many pieces tensor dim ``dim`` is cut into."""
        pieces = 1
        for size, placement in zip(self.mesh.shape, self.placements, strict=True):
            if is_split(placement) and placement.dim == dim:  # type: ignore[attr-defined]
                pieces *= size
        return pieces

    def __repr__(self) -> str:
        return f"Spec({tuple(self.shape)}, {self.dtype}, {self.placements!r}, {self.mesh!r})"


def _check_packed(spec: Spec) -> None:
    for axis, placement in enumerate(spec.placements):
        if not is_packed(placement):
            continue
        dim, parts, pieces = placement.dim, placement.parts, spec.mesh.shape[axis]  # type: ignore[attr-defined]
        if spec.shape[dim] % (parts * pieces):
            raise ValueError(
                f"{placement!r}: dim {dim} of shape {tuple(spec.shape)} cannot be split into {parts} parts over {pieces} devices evenly; "
                f"use Shard({dim})"
            )
        if spec.shards(dim) != pieces:
            raise ValueError(f"{spec.placements!r}: another axis splits dim {dim}, which {placement!r} packs")


_QUANTISED = frozenset({torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4})

_SPECS: weakref.WeakValueDictionary[tuple, Spec] = weakref.WeakValueDictionary()
_MESHES: weakref.WeakKeyDictionary[DeviceMesh, DeviceMesh] = weakref.WeakKeyDictionary()


def intern_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh object that specs use for every mesh equal to ``mesh``."""
    return _MESHES.setdefault(mesh, mesh)


def replicated(mesh: DeviceMesh) -> PlacementList:
    """Replicate on every axis of ``mesh``."""
    return PlacementList((REPLICATE,) * len(mesh.shape))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor."""
    if not shape:
        return ()
    if 0 in shape:
        shape = [size or 1 for size in shape]
    return tuple(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1]


_MESH_IDS: weakref.WeakKeyDictionary[DeviceMesh, int] = weakref.WeakKeyDictionary()
_next_mesh_id = itertools.count()


def mesh_id(mesh: DeviceMesh) -> int:
    """The number by which programs and commands name ``mesh``."""
    found = _MESH_IDS.get(mesh)
    if found is None:
        found = _MESH_IDS[mesh] = next(_next_mesh_id)
    return found
