"""Indexing by tensors: dims that are not indexed, and the dims of the indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...placement import PARTIAL, REPLICATE, Placement, shard
from ..strategy import Call, Strategy, TensorArg, enlarges, named, rule
from .pointwise import broadcast, keeps_sums

aten = torch.ops.aten
R, P = REPLICATE, PARTIAL
MASKS = (torch.bool, torch.uint8)


def _dim(call: Call) -> int:
    ndim = call.inputs[0].ndim
    return call.get("dim") % max(ndim, 1)


@rule(aten.index_select.default)
def index_select(call: Call) -> list[Strategy]:
    ndim, dim = call.inputs[0].ndim, _dim(call)
    if ndim == 0:
        return []
    found = [Strategy((shard(d), R), (shard(d),)) for d in range(ndim) if d != dim]
    if call.inputs[1].ndim == 1:
        found.append(Strategy((R, shard(0)), (shard(dim),)))
    return [*found, Strategy((P, R), (P,))]


@rule(aten.gather.default)
def gather(call: Call) -> list[Strategy]:
    """Position i of an index reads position i of every other dim, so those are split alike or not at all."""
    source, index = call.inputs
    if source.ndim != index.ndim or source.ndim == 0:
        return []
    dim = _dim(call)
    found = [Strategy((R, shard(dim)), (shard(dim),))]
    found += [
        Strategy((shard(d), shard(d)), (shard(d),))
        for d in range(source.ndim)
        if d != dim and source.shape[d] == index.shape[d]
    ]
    return [*found, Strategy((P, R), (P,))]


def _alike(call: Call, tensors: Sequence[TensorArg]) -> list[Strategy]:
    """Dims other than ``dim`` in which all of ``tensors`` have one size."""
    first = tensors[0]
    if first.ndim == 0 or any(t.ndim != first.ndim for t in tensors):
        return []
    dim = _dim(call)
    return [
        Strategy((shard(d),) * len(tensors), (shard(d),))
        for d in range(first.ndim)
        if d != dim and all(t.shape[d] == first.shape[d] for t in tensors)
    ]


@rule(
    aten.scatter.value,
    aten.scatter.src,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    aten.scatter_.value,
    aten.scatter_.src,
    aten.scatter_.reduce,
    aten.scatter_.value_reduce,
    aten.scatter_reduce.two,
    aten.scatter_reduce_.two,
)
def scatter(call: Call) -> list[Strategy]:
    return _alike(call, call.inputs)


@rule(aten.scatter_add.default, aten.scatter_add_.default)
def scatter_add(call: Call) -> list[Strategy]:
    """Additive: every device may add its own part into a pending sum."""
    found = _alike(call, call.inputs)
    found.append(Strategy((P, R, P), (P,)))
    if call.inputs[1].ndim and call.inputs[1].shape == call.inputs[2].shape:
        found.append(Strategy((P, shard(_dim(call)), shard(_dim(call))), (P,)))
    return found


@rule(
    aten.index_add.default,
    aten.index_add_.default,
    aten.index_copy.default,
    aten.index_copy_.default,
    aten.index_reduce.default,
    aten.index_reduce_.default,
)
def index_add(call: Call) -> list[Strategy]:
    """(self, dim, index [n], source): source has self's shape but for ``dim``."""
    target, index, source = call.inputs
    if target.ndim != source.ndim or target.ndim == 0:
        return []
    dim = _dim(call)
    found = [Strategy((shard(d), R, shard(d)), (shard(d),)) for d in range(target.ndim) if d != dim]
    if call.op in (aten.index_add.default, aten.index_add_.default) and not enlarges(call.get("alpha")):
        found.append(Strategy((P, R, P), (P,)))
        if index.ndim == 1:
            found.append(Strategy((P, shard(0), shard(dim)), (P,)))
    return found


@rule(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
def index_fill(call: Call) -> list[Strategy]:
    ndim, dim = call.inputs[0].ndim, _dim(call)
    return [named(call, (shard(d),), self=shard(d)) for d in range(ndim) if d != dim]


@rule(aten.take.default)
def take(call: Call) -> list[Strategy]:
    index = call.inputs[1]
    return [*[Strategy((R, shard(d)), (shard(d),)) for d in range(index.ndim)], Strategy((P, R), (P,))]


@rule(aten.embedding.default, by_form=True)
def embedding(call: Call) -> list[Strategy]:
    """A device that holds some rows gives zeros for the others' indices."""
    indices = call.inputs[1]
    found = [Strategy((R, shard(d)), (shard(d),)) for d in range(indices.ndim)]
    found.append(Strategy((shard(1), R), (shard(indices.ndim),)))
    found.append(Strategy((shard(0), R), (P,), local="dtorch.embedding"))
    return [*found, Strategy((P, R), (P,))]


@rule(aten.embedding_dense_backward.default)
def embedding_backward(call: Call) -> list[Strategy]:
    grad, indices = call.inputs
    found = [Strategy((shard(grad.ndim - 1), R), (shard(1),)), Strategy((P, R), (P,))]
    # Scaling by frequency needs all indices to count.
    if not call.get("scale_grad_by_freq"):
        found += [Strategy((shard(d), shard(d)), (P,)) for d in range(indices.ndim)]
    return found


class _Indexed:
    """How ``x[indices]`` maps dims: ``kept`` are (dim of x, dim of the result), ``at`` is where the indices' dims begin."""

    def __init__(self, x: TensorArg, indices: Sequence[TensorArg | None]) -> None:
        self.tensors = [t for t in indices if t is not None]
        self.masked = any(t.dtype in MASKS for t in self.tensors)
        #: The dims of x that each index takes up.
        self.taken: list[tuple[TensorArg, int]] = []
        position = 0
        for t in indices:
            if t is not None:
                self.taken.append((t, position))
            position += t.ndim if t is not None and t.dtype in MASKS else 1
        used = [d + k for t, d in self.taken for k in range(t.ndim if t.dtype in MASKS else 1)]
        self.shape = () if self.masked else tuple(torch.broadcast_shapes(*[t.shape for t in self.tensors]))
        adjacent = not used or used == list(range(used[0], used[0] + len(used)))
        # Indices with a None between them put their dims first.
        self.at = used[0] if used and adjacent else 0
        width = 1 if self.masked else len(self.shape)
        rest = [d for d in range(x.ndim) if d not in used]
        self.kept = [(d, i if i < self.at else i + width) for i, d in enumerate(rest)]


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> list[Strategy]:
    x = call.inputs[0]
    how = _Indexed(x, call.get("indices"))
    if how.masked or not how.tensors:
        return []
    replicated = (R,) * len(how.tensors)
    found = [Strategy((shard(d), *replicated), (shard(o),)) for d, o in how.kept]
    for d in range(len(how.shape)):
        placed = tuple([broadcast(t, d, how.shape) for t in how.tensors])
        found.append(Strategy((R, *placed), (shard(how.at + d),)))
    return [*found, Strategy((P, *replicated), (P,))]


@rule(
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index_put.default,
    aten._index_put_impl_.default,
)
def index_put(call: Call) -> list[Strategy]:
    x, values = call.inputs[0], call.get("values")
    how = _Indexed(x, call.get("indices"))
    if not how.tensors:
        return []
    if how.masked:
        return _masked_put(x, values, how)
    count = len(how.tensors)
    shape = list(how.shape)
    result = [0] * (len(how.kept) + len(shape))
    result[how.at : how.at + len(shape)] = shape
    for d, o in how.kept:
        result[o] = x.shape[d]
    found = [_put(shard(d), (R,) * count, broadcast(values, o, tuple(result))) for d, o in how.kept]
    if call.get("accumulate"):
        # Additive: every device may add its own part into a pending sum.
        found.append(_put(P, (R,) * count, P))
        for d in range(len(shape)):
            placed = tuple([broadcast(t, d, how.shape) for t in how.tensors])
            found.append(_put(P, placed, broadcast(values, how.at + d, tuple(result))))
    return found


def _put(x: Placement, indices: tuple[Placement, ...], values: Placement) -> Strategy:
    return Strategy((x, *indices, values), (x,))


def _masked_put(x: TensorArg, values: TensorArg, how: _Indexed) -> list[Strategy]:
    """One mask and one number: like masked_fill. Other values are as many as the mask has true elements, which no part knows."""
    if len(how.taken) != 1 or values.ndim:
        return []
    mask, start = how.taken[0]
    found = []
    for d in range(x.ndim):
        own = d - start
        found.append(_put(shard(d), (shard(own) if 0 <= own < mask.ndim else R,), R))
    return found


@rule(aten.cat.default, by_form=True)
def cat(call: Call) -> list[Strategy]:
    out = call.outputs[0]
    assert out is not None
    ndim = out.ndim
    if ndim == 0:
        return []
    dim = call.get("dim") % ndim
    found = []
    for d in range(ndim):
        if d != dim:
            # torch.cat still takes a 1-d tensor without elements among others; it has no dim d.
            inputs = tuple([shard(d) if t.ndim == ndim else R for t in call.inputs])
            found.append(Strategy(inputs, (shard(d),)))
    filled = [t.ndim == ndim and t.shape[dim] > 0 for t in call.inputs]
    if sum(filled) == 1:  # one tensor behind empty ones, as a key-value cache begins: its own shards stay
        found.append(Strategy(tuple([shard(dim) if own else R for own in filled]), (shard(dim),)))
    if keeps_sums(call, tuple(range(len(call.inputs)))):
        found.append(Strategy((P,) * len(call.inputs), (P,)))
    return found


@rule(aten.stack.default, by_form=True)
def stack(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    dim = call.get("dim") % (ndim + 1)
    count = len(call.inputs)
    found = [Strategy((shard(d),) * count, (shard(d + (d >= dim)),)) for d in range(ndim)]
    if keeps_sums(call, tuple(range(count))):
        found.append(Strategy((P,) * count, (P,)))
    return found


@rule(aten.constant_pad_nd.default)
def constant_pad(call: Call) -> list[Strategy]:
    """Dims that are not padded. The number it pads with is no part of a plan, so sums do not pass."""
    pad = call.get("pad")
    ndim = call.inputs[0].ndim
    padded = {ndim - 1 - i // 2 for i, n in enumerate(pad) if n != 0}
    return [Strategy((shard(d),), (shard(d),)) for d in range(ndim) if d not in padded]


@rule(
    aten.sort.default,
    aten.sort.stable,
    aten.argsort.default,
    aten.argsort.stable,
    aten.topk.default,
    aten.cummax.default,
    aten.cummin.default,
    aten.cumprod.default,
    aten.cumprod_.default,
    aten.logcumsumexp.default,
)
def along_dim(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    count = len(call.outputs)
    return [Strategy((shard(d),), (shard(d),) * count) for d in range(ndim) if d != _dim(call)]


@rule(aten.cumsum.default, aten.cumsum_.default)
def cumsum(call: Call) -> list[Strategy]:
    found = along_dim(call)
    if keeps_sums(call, (0,)):
        found.append(Strategy((P,), (P,)))
    return found


@rule(aten.renorm.default, aten.renorm_.default)
def renorm(call: Call) -> list[Strategy]:
    """The norm is over all dims but ``dim``."""
    return [Strategy((shard(_dim(call)),), (shard(_dim(call)),))]


@rule(aten.searchsorted.Tensor)
def searchsorted(call: Call) -> list[Strategy]:
    """(sorted sequence, values): a 1-d sequence serves every value; otherwise their leading dims agree."""
    sequence, values = call.get("sorted_sequence"), call.get("self")
    if sequence.ndim == 1:
        return [named(call, (shard(d),), self=shard(d)) for d in range(values.ndim)]
    leading = range(sequence.ndim - 1)
    found = [named(call, (shard(d),), self=shard(d), sorted_sequence=shard(d), sorter=shard(d)) for d in leading]
    return [*found, named(call, (shard(values.ndim - 1),), self=shard(values.ndim - 1))]


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def scatter_slice(call: Call) -> list[Strategy]:
    """(self, src, dim): other dims; linear in both."""
    x = call.inputs[0]
    dim = _dim(call)
    gone = call.op is aten.select_scatter.default
    found = [Strategy((shard(d), shard(d - (gone and d > dim))), (shard(d),)) for d in range(x.ndim) if d != dim]
    return [*found, Strategy((P, P), (P,))] if keeps_sums(call, (0, 1)) else found


@rule(aten.linalg_cross.default)
def cross(call: Call) -> list[Strategy]:
    """Pointwise but for one dim."""
    out = call.outputs[0]
    assert out is not None
    dim = call.get("dim") % out.ndim
    return [
        Strategy(tuple([broadcast(t, d, out.shape) for t in call.inputs]), (shard(d),))
        for d in range(out.ndim)
        if d != dim
    ]
