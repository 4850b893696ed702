"""Tensors in which one place in memory is several elements, as after ``expand``: written, and moved, once a place.

torch's ``copy_`` refuses to write such a tensor, and what arrives elsewhere has a place for each element, so that a write to one would
not be seen in the others.
"""

from __future__ import annotations

from ..program.ir import Slot
from .builder import Builder
from .spec import Spec


def repeated(spec: Spec) -> tuple[int, ...]:
    """The dims along which all elements are one place."""
    return tuple(
        [dim for dim, (size, step) in enumerate(zip(spec.shape, spec.stride, strict=True)) if step == 0 and size > 1]
    )


def once(builder: Builder, slot: int, spec: Spec) -> int:
    """A view of the value in ``slot`` with each place of ``spec`` once: its `repeated` dims have size 1."""
    for dim in repeated(spec):
        out = builder.slot()
        builder.op("aten.slice.Tensor", [Slot(slot), dim, 0, 1], [out])
        slot = out
    return slot


def assign(builder: Builder, target: int, source: int, spec: Spec) -> None:
    """Write the value in slot ``source`` into the one in ``target``; both are laid out as ``spec``, and agree where it repeats."""
    builder.op("aten.copy_.default", [Slot(once(builder, target, spec)), Slot(once(builder, source, spec))], [-1])


def reshard(builder: Builder, source: int, spec: Spec, target: Spec) -> int:
    """As `Builder.reshard`, but what is one place in memory is one there too (unless it is sharded along a repeated dim)."""
    dims = repeated(spec)
    if not dims or any(p.is_shard() and p.dim in dims for p in (*spec.placements, *target.placements)):  # type: ignore[attr-defined]
        return builder.reshard(source, spec, target)
    shape = tuple([1 if dim in dims else size for dim, size in enumerate(spec.shape)])
    here, there = [Spec.of(s.mesh, s.placements, shape, s.stride, s.dtype) for s in (spec, target)]
    moved = builder.reshard(once(builder, source, spec), here, there)
    out = builder.slot()
    sizes = builder.operand([size if dim in dims else -1 for dim, size in enumerate(spec.shape)])
    builder.op("aten.expand.default", [Slot(moved), sizes], [out])
    return out
