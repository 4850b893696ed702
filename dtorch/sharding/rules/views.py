"""Views and rearrangements: a dim that survives whole keeps its sharding; pending sums pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import torch

from ...placement import PARTIAL, shard
from ..strategy import Call, Strategy, everywhere, rule

aten = torch.ops.aten


def follow(call: Call, pairs: Iterable[tuple[int, int]], local: str | None = None) -> list[Strategy]:
    """(dim of the input, dim of every output) pairs that keep a sharding; and pending sums, for these ops are linear."""
    outputs = call.outputs
    found = [Strategy((shard(i),), tuple([shard(o)] * len(outputs)), local=local) for i, o in pairs]
    found.append(Strategy((PARTIAL,), tuple([PARTIAL] * len(outputs)), local=local))
    return found


def others(call: Call, *dims: int) -> list[Strategy]:
    """Every dim but ``dims``, which keep their place."""
    ndim = call.inputs[0].ndim
    mine = {d % ndim for d in dims} if ndim else set()
    return follow(call, [(d, d) for d in range(ndim) if d not in mine])


def _same(call: Call) -> list[Strategy]:
    return follow(call, [(d, d) for d in range(call.inputs[0].ndim)])


rule(
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift.default,
    aten._conj.default,
    aten._neg_view.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
    aten.view_as_real.default,
    aten.contiguous.default,
    by_form=True,
)(_same)


@rule(aten.view_as_complex.default, by_form=True)
def view_as_complex(call: Call) -> list[Strategy]:
    return follow(call, [(d, d) for d in range(call.inputs[0].ndim - 1)])


@rule(aten.view.dtype)
def view_dtype(call: Call) -> list[Strategy]:
    """Bits are no sums, and with another item size the last dim changes."""
    same = call.inputs[0].dtype.itemsize == call.outputs[0].dtype.itemsize  # type: ignore[union-attr]
    return [everywhere(shard(d), call) for d in range(call.inputs[0].ndim - (not same))]


@rule(aten.view.default, aten._unsafe_view.default, aten.view_copy.default, local_shapes={"size": 0})
def view(call: Call) -> list[Strategy]:
    return _regrouped(call, None)


@rule(aten.reshape.default, local_shapes={"shape": 0})
def reshape(call: Call) -> list[Strategy]:
    return _regrouped(call, None)


@rule(aten._reshape_alias.default, local_shapes={"size": 0})
def reshape_alias(call: Call) -> list[Strategy]:
    """Its stride argument is global; locally the size says enough."""
    return _regrouped(call, "dtorch.reshape_alias")


def _regrouped(call: Call, local: str | None) -> list[Strategy]:
    shape, out = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    outputs_partial = Strategy((PARTIAL,), (PARTIAL,), local=local)
    found = []
    for i, o in regroup(shape, out):
        # A part of n-th of the first dim of a group is a part of n-th of its elements, if n divides both sizes.
        even = None if shape[i] == out[o] else math.gcd(shape[i], out[o])
        if even != 1:
            found.append(Strategy((shard(i),), (shard(o),), even=even, local=local))
    found.append(outputs_partial)
    return found


def regroup(shape: tuple[int, ...], out: tuple[int, ...]) -> list[tuple[int, int]]:
    """For a reshape, the pairs (dim, dim of the result) that begin groups of equal size, and dims of size 1 that stay in place."""
    if 0 in shape:
        return [(d, d) for d in range(len(shape))] if shape == out else []
    pairs = []
    i = o = 0
    while i < len(shape) and o < len(out):
        if shape[i] == 1 and out[o] == 1:
            pairs.append((i, o))
            i, o = i + 1, o + 1
            continue
        if shape[i] == 1 and out[o] != 1:
            i += 1
            continue
        if out[o] == 1:
            o += 1
            continue
        pairs.append((i, o))
        left, right = shape[i], out[o]
        i, o = i + 1, o + 1
        while left != right:
            if left < right:
                left *= shape[i]
                i += 1
            else:
                right *= out[o]
                o += 1
    return pairs


@rule(aten.expand.default, local_shapes={"size": 0})
def expand(call: Call) -> list[Strategy]:
    shape, out = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    new = len(out) - len(shape)
    return follow(call, [(d, d + new) for d in range(len(shape)) if shape[d] == out[d + new]])


@rule(aten.permute.default, by_form=True)
def permute(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    return follow(call, [(d % ndim, o) for o, d in enumerate(call.get("dims"))])


@rule(aten.transpose.int, by_form=True)
def transpose(call: Call) -> list[Strategy]:
    return _swapped(call, call.get("dim0"), call.get("dim1"))


@rule(aten.t.default, aten.numpy_T.default, by_form=True)
def t(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    return follow(call, [(d, ndim - 1 - d) for d in range(ndim)])


def _swapped(call: Call, first: int, second: int) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    order = list(range(ndim))
    if ndim:
        order[first], order[second] = order[second], order[first]
    return follow(call, [(d, o) for o, d in enumerate(order)])


@rule(aten.unsqueeze.default, by_form=True)
def unsqueeze(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    new = call.get("dim") % (ndim + 1)
    return follow(call, [(d, d + (d >= new)) for d in range(ndim)])


@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, by_form=True)
def squeeze(call: Call) -> list[Strategy]:
    """A part may have size 1 where the whole has not, so locally the result's shape says what to squeeze."""
    shape = call.inputs[0].shape
    named = call.get("dim") if call.op is not aten.squeeze.default else list(range(len(shape)))
    named = [named] if isinstance(named, int) else named
    gone = {d % len(shape) for d in named if shape[d] == 1} if shape else set()
    kept = [d for d in range(len(shape)) if d not in gone]
    return follow(call, [(d, o) for o, d in enumerate(kept)], local="dtorch.view_as_output")


@rule(aten.slice.Tensor, by_form=True)
def slice_(call: Call) -> list[Strategy]:
    dim = call.get("dim")
    # A slice of everything also means everything of a part.
    if call.get("step") == 1 and call.outputs[0].shape[dim] == call.inputs[0].shape[dim]:  # type: ignore[union-attr]
        return _same(call)
    return others(call, dim)


@rule(aten.select.int, by_form=True)
def select(call: Call) -> list[Strategy]:
    return _without(call, call.get("dim"))


@rule(aten.unbind.int, by_form=True)
def unbind(call: Call) -> list[Strategy]:
    return _without(call, call.get("dim"))


def _without(call: Call, dim: int) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    dim %= ndim
    return follow(call, [(d, d - (d > dim)) for d in range(ndim) if d != dim])


@rule(
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
    aten.split_with_sizes_copy.default,
)
def split(call: Call) -> list[Strategy]:
    return others(call, call.get("dim"))


@rule(aten.narrow.default, aten.chunk.default, aten.unsafe_chunk.default)
def narrow(call: Call) -> list[Strategy]:
    return others(call, call.get("dim"))


@rule(aten.diagonal.default)
def diagonal(call: Call) -> list[Strategy]:
    ndim = call.inputs[0].ndim
    gone = {call.get("dim1") % ndim, call.get("dim2") % ndim}
    kept = [d for d in range(ndim) if d not in gone]
    return follow(call, [(d, o) for o, d in enumerate(kept)])


@rule(aten.unfold.default)
def unfold(call: Call) -> list[Strategy]:
    return others(call, call.get("dimension"))


@rule(aten.flip.default)
def flip(call: Call) -> list[Strategy]:
    return others(call, *call.get("dims"))


@rule(aten.roll.default)
def roll(call: Call) -> list[Strategy]:
    """Without dims it rolls the flattened tensor."""
    dims = call.get("dims")
    dims = [dims] if isinstance(dims, int) else dims
    return others(call, *(dims or range(call.inputs[0].ndim)))


@rule(aten.repeat.default)
def repeat(call: Call) -> list[Strategy]:
    repeats = call.get("repeats")
    new = len(repeats) - call.inputs[0].ndim
    return follow(call, [(d, d + new) for d in range(call.inputs[0].ndim) if repeats[d + new] == 1])


@rule(aten.repeat_interleave.self_int)
def repeat_interleave(call: Call) -> list[Strategy]:
    dim = call.get("dim")
    return [] if dim is None else others(call, dim)


@rule(aten.tril.default, aten.triu.default, aten.tril_.default, aten.triu_.default, by_form=True)
def triangle(call: Call) -> list[Strategy]:
    return others(call, -1, -2)


@rule(aten.select_backward.default, local_shapes={"input_sizes": 0})
def select_backward(call: Call) -> list[Strategy]:
    ndim = call.outputs[0].ndim  # type: ignore[union-attr]
    dim = call.get("dim") % ndim
    return follow(call, [(d - (d > dim), d) for d in range(ndim) if d != dim])


@rule(aten.slice_backward.default, local_shapes={"input_sizes": 0})
def slice_backward(call: Call) -> list[Strategy]:
    if call.inputs[0].shape == call.outputs[0].shape and call.get("start") == 0:  # type: ignore[union-attr]
        return _same(call)
    return others(call, call.get("dim"))


@rule(aten.unfold_backward.default, local_shapes={"input_sizes": 0})
def unfold_backward(call: Call) -> list[Strategy]:
    ndim = call.outputs[0].ndim  # type: ignore[union-attr]
    return follow(call, [(d, d) for d in range(ndim) if d != call.get("dim") % ndim])


@rule(aten.diagonal_backward.default, local_shapes={"input_sizes": 0})
def diagonal_backward(call: Call) -> list[Strategy]:
    ndim = call.outputs[0].ndim  # type: ignore[union-attr]
    gone = {call.get("dim1") % ndim, call.get("dim2") % ndim}
    kept = [d for d in range(ndim) if d not in gone]
    return follow(call, [(i, d) for i, d in enumerate(kept)])


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def pixel_shuffle(call: Call) -> list[Strategy]:
    """It reshapes with a size to infer, which an empty part cannot tell."""
    return [dataclasses.replace(s, nonempty=True) for s in others(call, -1, -2, -3)]
