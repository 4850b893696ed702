"""Matrix products: rows, columns, the contracted dim (a pending sum), batches."""

from __future__ import annotations

import dataclasses

import torch

from ...placement import PARTIAL, REPLICATE, Placement, shard
from ..strategy import Call, Strategy, TensorArg, enlarges, rule
from .pointwise import broadcast

aten = torch.ops.aten
R, P = REPLICATE, PARTIAL


def _product(
    call: Call, bias: TensorArg | None, triples: list[tuple[Placement, Placement, Placement]]
) -> list[Strategy]:
    """Strategies of ``beta * bias + alpha * a @ b`` from those of ``a @ b``, given as (a, b, out)."""
    if bias is None:
        return [Strategy((a, b), (out,)) for a, b, out in triples]
    shape = call.outputs[0].shape  # type: ignore[union-attr]
    scaled = call.op is not aten.linear.default and (enlarges(call.get("alpha")) or enlarges(call.get("beta")))
    found = []
    for a, b, out in triples:
        if out is P and scaled:
            continue
        placed = P if out is P else broadcast(bias, out.dim, shape)  # type: ignore[attr-defined]
        found.append(Strategy((placed, a, b), (out,)))
    return found


MATRIX = [(shard(0), R, shard(0)), (R, shard(1), shard(1)), (shard(1), shard(0), P)]
BATCHED = [
    (shard(0), shard(0), shard(0)),
    (shard(1), R, shard(1)),
    (R, shard(2), shard(2)),
    (shard(2), shard(1), P),
]
MATRIX_VECTOR = [(shard(0), R, shard(0)), (shard(1), shard(0), P)]


@rule(aten.mm.default, by_form=True)
def mm(call: Call) -> list[Strategy]:
    return _product(call, None, MATRIX)


@rule(aten.addmm.default, aten.addmm_.default, by_form=True)
def addmm(call: Call) -> list[Strategy]:
    return _product(call, call.inputs[0], MATRIX)


@rule(aten.bmm.default, by_form=True)
def bmm(call: Call) -> list[Strategy]:
    return _product(call, None, BATCHED)


@rule(aten.baddbmm.default, aten.baddbmm_.default, by_form=True)
def baddbmm(call: Call) -> list[Strategy]:
    return _product(call, call.inputs[0], BATCHED)


@rule(aten.mv.default, by_form=True)
def mv(call: Call) -> list[Strategy]:
    return _product(call, None, MATRIX_VECTOR)


@rule(aten.addmv.default, aten.addmv_.default, by_shards=True)
def addmv(call: Call) -> list[Strategy]:
    """With no rows, torch 2.13 returns the bias unbroadcast."""
    return [dataclasses.replace(s, nonempty=True) for s in _product(call, call.inputs[0], MATRIX_VECTOR)]


@rule(aten.dot.default, aten.vdot.default, by_form=True)
def dot(call: Call) -> list[Strategy]:
    if call.inputs[0].dtype.itemsize < 4:
        return []  # torch rounds the sum once; pending addends would each be rounded, for one number
    return _product(call, None, [(shard(0), shard(0), P)])


@rule(aten.addr.default, aten.addr_.default, by_form=True)
def addr(call: Call) -> list[Strategy]:
    """``bias + outer(a, b)``."""
    return _product(call, call.inputs[0], [(shard(0), R, shard(0)), (R, shard(0), shard(1))])


@rule(aten.addbmm.default, aten.addbmm_.default, by_form=True)
def addbmm(call: Call) -> list[Strategy]:
    """``bias + sum over the batch of a @ b``."""
    triples = [
        (shard(0), shard(0), P),
        (shard(1), R, shard(0)),
        (R, shard(2), shard(1)),
        (shard(2), shard(1), P),
    ]
    return _product(call, call.inputs[0], triples)


@rule(aten.linear.default, by_form=True)
def linear(call: Call) -> list[Strategy]:
    """(input [..., K], weight [N, K], bias [N])."""
    x, weight = call.inputs[:2]
    if weight.ndim != 2 or x.ndim < 2:
        return []
    last = x.ndim - 1
    triples = [(shard(d), R, shard(d)) for d in range(last)]
    triples += [(R, shard(0), shard(last)), (shard(last), shard(1), P)]
    if len(call.inputs) == 2:
        return _product(call, None, triples)
    bias = call.inputs[2]
    return [Strategy((s.inputs[1], s.inputs[2], s.inputs[0]), s.outputs) for s in _product(call, bias, triples)]


@rule(aten.matmul.default)
def matmul(call: Call) -> list[Strategy]:
    """(…, M, K), (…, K, N), of which the batches broadcast; vectors do not come here."""
    a, b = call.inputs
    if min(a.ndim, b.ndim) < 2:
        return []
    shape = call.outputs[0].shape  # type: ignore[union-attr]
    batch, rows, columns = shape[:-2], len(shape) - 2, len(shape) - 1
    stacks = [dataclasses.replace(t, shape=t.shape[:-2]) for t in (a, b)]
    triples = [(*(broadcast(t, dim, batch) for t in stacks), shard(dim)) for dim in range(len(batch))]
    triples += [(shard(a.ndim - 2), R, shard(rows)), (R, shard(b.ndim - 1), shard(columns))]
    return _product(call, None, [*triples, (shard(a.ndim - 1), shard(b.ndim - 2), P)])


#: By the ranks of a and b: rows, columns and the contracted dim, as far as groups do not run along them.
GROUPED = {
    (2, 3): [(R, shard(2), shard(1)), (shard(1), shard(1), P)],
    (2, 2): [(shard(0), R, shard(1)), (R, shard(1), shard(2))],
    (3, 2): [(shard(1), R, shard(0)), (shard(2), shard(0), P)],
    (3, 3): BATCHED,
}


@rule(aten._grouped_mm.default)
def grouped_mm(call: Call) -> list[Strategy]:
    """The experts of a mixture: ``offs`` says where groups of rows (or of the contracted dim) end. Kernels want rows of whole 16 bytes."""
    a, b = call.inputs[:2]
    if call.get("bias") is not None:
        return []
    whole = 16 // a.dtype.itemsize
    found = []
    for strategy in _product(call, None, GROUPED[a.ndim, b.ndim]):
        sizes = [t.shape[p.dim] for t, p in zip((a, b), strategy.inputs, strict=True) if p is not R]  # type: ignore[attr-defined]
        if all(size % whole == 0 for size in sizes):
            offs = (R,) * (len(call.inputs) - 2)
            found.append(Strategy((*strategy.inputs, *offs), strategy.outputs, even=min(sizes) // whole))
    return found


@rule(aten.tensordot.default)
def tensordot(call: Call) -> list[Strategy]:
    """The output has the dims of a that are not contracted, then those of b."""
    a, b = call.inputs
    pairs = [(i % a.ndim, j % b.ndim) for i, j in zip(call.get("dims_self"), call.get("dims_other"), strict=True)]
    if any(a.shape[i] != b.shape[j] for i, j in pairs):
        return []  # sizes of 1 are broadcast, that is, summed
    left = [dim for dim in range(a.ndim) if dim not in [i for i, _ in pairs]]
    right = [dim for dim in range(b.ndim) if dim not in [j for _, j in pairs]]
    found = [Strategy((shard(i), shard(j)), (P,)) for i, j in pairs]
    found += [Strategy((shard(dim), R), (shard(at),)) for at, dim in enumerate(left)]
    return found + [Strategy((R, shard(dim)), (shard(len(left) + at),)) for at, dim in enumerate(right)]
