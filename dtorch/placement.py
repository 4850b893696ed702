"""Placements: how one mesh axis holds a tensor.

Thin subclasses of torch's C++ placements, which cost nothing to import, equal ``torch.distributed.tensor``'s own and are
accepted wherever those are. Planning compares placements by identity, so everything inside dtorch passes through
`normalize`, which returns the one instance of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch._C import _distributed as _c

Placement = _c.Placement

#: Reductions that a plan may leave pending between two of its instructions. Only ``sum`` is public.
REDUCE_OPS = ("sum", "max", "min", "product", "and", "or")


class Shard(_c.Shard):
    """Tensor dim ``dim`` is split over the mesh axis as ``torch.chunk`` splits it: the last shards may be smaller or empty.

    A negative ``dim`` counts from the tensor's last; a tensor says it non-negative.

    Raises:
        TypeError: ``dim`` is not an int.

    Example::

        >>> import torch.distributed.tensor
        >>> Shard(0) == torch.distributed.tensor.Shard(0)
        True
    """

    def __init__(self, dim: int) -> None:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"Shard(): argument 'dim' must be int, not {type(dim).__name__}")
        super().__init__(dim)

    def __eq__(self, other: object) -> bool:
        return self is other or (is_shard(other) and other.dim == self.dim)  # type: ignore[arg-type, attr-defined]

    def __hash__(self) -> int:
        return hash(self.dim)

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})"

    __str__ = __repr__

    def __reduce__(self) -> tuple:
        return Shard, (self.dim,)


class Replicate(_c.Replicate):
    """Every device along the mesh axis holds the whole tensor.

    Example::

        >>> import torch.distributed.tensor
        >>> Replicate() == torch.distributed.tensor.Replicate()
        True
    """

    def __eq__(self, other: object) -> bool:
        kind = type(other)
        return kind is Replicate or (kind not in _OWN and isinstance(other, _c.Replicate))

    def __hash__(self) -> int:
        return -1

    def __repr__(self) -> str:
        return "Replicate()"

    __str__ = __repr__

    def __reduce__(self) -> tuple:
        return Replicate, ()


class Partial(_c.Partial):
    """Every device along the mesh axis holds an addend; the tensor's value is their sum.

    Raises:
        ValueError: ``reduce_op`` is not ``"sum"``: maxima and the like are never pending in a tensor.

    Example::

        >>> import torch.distributed.tensor
        >>> Partial() == torch.distributed.tensor.Partial("sum")
        True
    """

    def __init__(self, reduce_op: str = "sum") -> None:
        if reduce_op != "sum":
            raise ValueError(f"Partial(): reduce_op must be 'sum', got {reduce_op!r}: only sums may be pending")
        super().__init__(reduce_op)

    def __eq__(self, other: object) -> bool:
        return self is other or (is_partial(other) and other.reduce_op == self.reduce_op)  # type: ignore[arg-type, attr-defined]

    def __hash__(self) -> int:
        return 1 + hash(self.reduce_op)

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"

    __str__ = __repr__

    def __reduce__(self) -> tuple:
        return partial, (self.reduce_op,)


class PackedShard(_c.StridedShard):
    """Tensor dim ``dim`` packs ``parts`` equal blocks side by side, and the mesh axis splits each as `Shard` would.

    For weights that are several matrices in one, as ``gate_up_proj`` is: a device holds the same rows of each matrix, one block
    after the other, and what it computes of them can be taken apart where it is. Parts times the devices of the axis must divide the
    dim, which no other axis may split. What upstream calls ``_StridedShard(dim, split_factor=parts)``.

    Raises:
        TypeError: ``dim`` or ``parts`` is not an int.
        ValueError: fewer than two parts, which is a `Shard`.

    Example::

        >>> PackedShard(0, 2)
        PackedShard(dim=0, parts=2)
    """

    def __init__(self, dim: int, parts: int) -> None:
        for name, value in (("dim", dim), ("parts", parts)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"PackedShard(): argument {name!r} must be int, not {type(value).__name__}")
        if parts < 2:
            raise ValueError(f"PackedShard(): parts must be at least 2, got {parts}; one part is Shard({dim})")
        super().__init__(dim, split_factor=parts)

    @property
    def parts(self) -> int:
        return self.split_factor

    def __eq__(self, other: object) -> bool:
        return self is other or (is_packed(other) and (other.dim, other.parts) == (self.dim, self.parts))  # type: ignore[arg-type, attr-defined]

    def __hash__(self) -> int:
        return hash((self.dim, self.parts))

    def __repr__(self) -> str:
        return f"PackedShard(dim={self.dim}, parts={self.parts})"

    __str__ = __repr__

    def __reduce__(self) -> tuple:
        return PackedShard, (self.dim, self.parts)


REPLICATE = Replicate()
PARTIAL = Partial()
_SHARDS: dict[int, Shard] = {}
_PACKED: dict[tuple[int, int], PackedShard] = {}
_PARTIALS: dict[str, Partial] = {"sum": PARTIAL}
for _op in REDUCE_OPS[1:]:
    _PARTIALS[_op] = Partial.__new__(Partial)
    _c.Partial.__init__(_PARTIALS[_op], _op)


def shard(dim: int) -> Shard:
    """The one `Shard` of a non-negative ``dim``."""
    found = _SHARDS.get(dim)
    if found is None:
        found = _SHARDS[dim] = Shard(dim)
    return found


def packed(dim: int, parts: int) -> PackedShard:
    """The one `PackedShard` of a non-negative ``dim`` and ``parts``."""
    found = _PACKED.get((dim, parts))
    if found is None:
        found = _PACKED[dim, parts] = PackedShard(dim, parts)
    return found


def partial(reduce_op: str = "sum") -> Partial:
    """The one `Partial` of ``reduce_op``; all but ``sum`` stay inside a plan."""
    return _PARTIALS[reduce_op]


_OWN = frozenset({Shard, Replicate, Partial, PackedShard})


# By type first: the C++ classes' own `isinstance` runs Python (0.5 us, torch 2.13), and planning asks a hundred times.
def is_shard(placement: Placement) -> bool:
    kind = type(placement)
    return kind is Shard or (kind not in _OWN and isinstance(placement, _c.Shard))


def is_partial(placement: Placement) -> bool:
    kind = type(placement)
    return kind is Partial or (kind not in _OWN and isinstance(placement, _c.Partial))


def is_packed(placement: Placement) -> bool:
    return type(placement) is PackedShard


def is_split(placement: Placement) -> bool:
    """Whether devices hold different parts of a dim: sharded, as a whole or packed."""
    kind = type(placement)
    return kind is Shard or kind is PackedShard or (kind not in _OWN and isinstance(placement, _c.Shard))


def along(placement: Placement, dim: int) -> Placement:
    """The same way of splitting another dim; what splits none is as it was."""
    if is_packed(placement):
        return packed(dim, placement.parts)  # type: ignore[attr-defined]
    return shard(dim) if is_shard(placement) else placement


class PlacementList(tuple):
    """A tensor's placements, one a mesh axis: a tuple that also equals the same list, and prints as a list."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            other = tuple(other)
        return self is other or tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return "[" + ", ".join(map(repr, self)) + "]"


def normalize(placements: Sequence[Placement], mesh_ndim: int, tensor_ndim: int) -> PlacementList:
    """Check ``placements`` against a mesh of ``mesh_ndim`` axes and a tensor of ``tensor_ndim`` dims; make dims non-negative.

    Raises:
        TypeError: ``placements`` is not a sequence of placements.
        ValueError: wrong number of them, a shard dim out of range, or a reduction other than a sum.
    """
    if isinstance(placements, Placement) or not isinstance(placements, (list, tuple)):
        raise TypeError(f"placements must be a list of Shard, Replicate or Partial, got {placements!r}")
    if len(placements) != mesh_ndim:
        raise ValueError(
            f"placements must have one entry per mesh axis: the mesh has {mesh_ndim}, got {len(placements)}: {list(placements)!r}"
        )
    out: list[Placement] = []
    for placement in placements:
        if not is_packed(placement) and (
            isinstance(placement, _c.StridedShard) or type(placement).__name__ == "_StridedShard"
        ):
            raise ValueError(f"placements: {placement!r} is not supported; use Shard(dim)")
        if isinstance(placement, (_c.Shard, PackedShard)):
            dim = placement.dim
            if tensor_ndim == 0:
                raise ValueError(f"placements: {placement!r} cannot split a 0-d tensor; use Replicate() or Partial()")
            if not -tensor_ndim <= dim < tensor_ndim:
                raise ValueError(
                    f"placements: {placement!r} is out of range for a {tensor_ndim}-d tensor "
                    f"(expected a dim in [{-tensor_ndim}, {tensor_ndim - 1}])"
                )
            out.append(along(placement, dim % tensor_ndim))
        elif isinstance(placement, _c.Replicate):
            out.append(REPLICATE)
        elif isinstance(placement, _c.Partial):
            if placement.reduce_op != "sum":
                raise ValueError(f"placements: only sums may be pending, got Partial({placement.reduce_op!r})")
            out.append(PARTIAL)
        else:
            raise TypeError(f"placements must be Shard, Replicate or Partial, got {placement!r}")
    return PlacementList(out)


def settled(placements: Iterable[Placement]) -> PlacementList:
    """``placements`` with pending sums completed, hence replicated."""
    return PlacementList(REPLICATE if is_partial(p) else p for p in placements)


def boxed(placements: Iterable[Placement]) -> PlacementList:
    """``placements`` with pending sums completed and packed dims whole: then what a device holds is one box of the tensor."""
    return PlacementList(REPLICATE if is_partial(p) or is_packed(p) else p for p in placements)


def encode(placements: Sequence[Placement]) -> list[int | str]:
    """Placements in a form that fits msgpack: a shard's dim, -1 for a replica, the name of a pending reduction, ``dim/parts`` if packed."""
    return [_code(p) for p in placements]


def _code(placement: Placement) -> int | str:
    if is_shard(placement):
        return placement.dim  # type: ignore[attr-defined]
    if is_packed(placement):
        return f"{placement.dim}/{placement.parts}"  # type: ignore[attr-defined]
    return placement.reduce_op if is_partial(placement) else -1  # type: ignore[attr-defined]


def decode(codes: Sequence[int | str]) -> PlacementList:
    """The inverse of `encode`."""
    return PlacementList(map(_decoded, codes))


def _decoded(code: int | str) -> Placement:
    if isinstance(code, int):
        return REPLICATE if code < 0 else shard(code)
    dim, _, parts = code.partition("/")
    return packed(int(dim), int(parts)) if parts else partial(code)
