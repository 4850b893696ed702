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
        return self is other or isinstance(other, _c.Replicate)

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


REPLICATE = Replicate()
PARTIAL = Partial()
_SHARDS: dict[int, Shard] = {}
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


def partial(reduce_op: str = "sum") -> Partial:
    """The one `Partial` of ``reduce_op``; all but ``sum`` stay inside a plan."""
    return _PARTIALS[reduce_op]


# By type first: the C++ classes' own `isinstance` runs Python (0.5 us, torch 2.13), and planning asks a hundred times.
def is_shard(placement: Placement) -> bool:
    kind = type(placement)
    return kind is Shard or (kind is not Replicate and kind is not Partial and isinstance(placement, _c.Shard))


def is_partial(placement: Placement) -> bool:
    kind = type(placement)
    return kind is Partial or (kind is not Replicate and kind is not Shard and isinstance(placement, _c.Partial))


class PlacementList(tuple):
    """A tensor's placements, one a mesh axis: a tuple that also equals the same list, and prints as a list."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, list):
            other = tuple(other)
        return tuple.__eq__(self, other)

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
        if type(placement) is _c.StridedShard or type(placement).__name__ == "_StridedShard":
            raise ValueError(f"placements: {placement!r} is not supported; use Shard(dim)")
        if isinstance(placement, _c.Shard):
            dim = placement.dim
            if tensor_ndim == 0:
                raise ValueError(f"placements: {placement!r} cannot split a 0-d tensor; use Replicate() or Partial()")
            if not -tensor_ndim <= dim < tensor_ndim:
                raise ValueError(
                    f"placements: {placement!r} is out of range for a {tensor_ndim}-d tensor "
                    f"(expected a dim in [{-tensor_ndim}, {tensor_ndim - 1}])"
                )
            out.append(shard(dim % tensor_ndim))
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


def encode(placements: Sequence[Placement]) -> list[int | str]:
    """Placements in a form that fits msgpack: a shard's dim, -1 for a replica, or the name of a pending reduction."""
    return [p.dim if is_shard(p) else p.reduce_op if is_partial(p) else -1 for p in placements]  # type: ignore[attr-defined]


def decode(codes: Sequence[int | str]) -> PlacementList:
    """The inverse of `encode`."""
    return PlacementList(
        partial(code) if isinstance(code, str) else REPLICATE if code < 0 else shard(code) for code in codes
    )
