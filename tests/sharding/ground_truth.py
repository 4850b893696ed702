"""Run a rule's strategies on pieces of plain tensors and merge the results: they must be what plain torch gives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import REPLICATE, Placement, is_packed, is_partial, is_shard
from dtorch.sharding import packing
from dtorch.sharding.choose import _aliased_outputs
from dtorch.sharding.layout import local_box, local_shape
from dtorch.sharding.problem import legal
from dtorch.sharding.rules import rule_for
from dtorch.sharding.spec import Spec
from dtorch.sharding.strategy import Call, Group, Strategy, TensorArg
from dtorch.worker import functions_sharded as _functions  # noqa: F401  (registers them)
from dtorch.worker.registry import DEVICE_FUNCTIONS, Here

aten = torch.ops.aten

REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "and": torch.logical_and,
    "or": torch.logical_or,
}

#: Outputs whose contents mean nothing.
UNDEFINED = {
    aten.log_sigmoid_forward.default: {1},
    aten.empty_like.default: {0},
    aten.new_empty.default: {0},
    aten.new_empty_strided.default: {0},
}


@dataclasses.dataclass
class Sample:
    """One call with real tensors. ``special``: infinite and huge values among them, or as a number."""

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    special: bool = False

    def __repr__(self) -> str:
        return f"{self.op}{tuple(map(_short, self.args))}{ {k: _short(v) for k, v in self.kwargs.items()} or '' }"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_short, value)) + "]"
    return repr(value)


def tree(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor changed, in order."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(tree(v, change) for v in value)
    if isinstance(value, dict):
        return {k: tree(v, change) for k, v in value.items()}
    return value


def tensors(value: Any) -> list[Any]:
    """The tensors of a result, flattened; None for what is none."""
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors(v)]
    return [value if isinstance(value, torch.Tensor) else None]


def inputs_of(sample: Sample) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree((sample.args, sample.kwargs), found.append)
    return found


def run_whole(sample: Sample) -> tuple[list[Any], list[torch.Tensor]]:
    """(outputs, inputs afterwards) of plain torch."""
    copies: list[torch.Tensor] = []

    def copy(t: torch.Tensor) -> torch.Tensor:
        copies.append(dense(t))
        return copies[-1]

    args, kwargs = tree(sample.args, copy), tree(sample.kwargs, copy)
    with torch.no_grad():
        outputs = tensors(sample.op(*args, **kwargs))
    return [None if o is None else dense(o) for o in outputs], copies


def dense(t: torch.Tensor) -> torch.Tensor:
    """A packed copy with the same order of dims in memory."""
    order = sorted(range(t.ndim), key=lambda d: (-t.stride(d), d))
    inverse = [order.index(d) for d in range(t.ndim)]
    return t.detach().permute(order).clone(memory_format=torch.contiguous_format).permute(inverse)


def call_of(sample: Sample, outputs: Sequence[torch.Tensor | None]) -> Call:
    found: list[TensorArg] = []

    def arg(t: torch.Tensor) -> TensorArg:
        found.append(TensorArg(len(found), tuple(t.shape), t.stride(), t.dtype))
        return found[-1]

    args, kwargs = tree(sample.args, arg), tree(sample.kwargs, arg)
    outs = tuple(
        None if o is None else TensorArg(i, tuple(o.shape), o.stride(), o.dtype) for i, o in enumerate(outputs)
    )
    return Call(sample.op, args, kwargs, tuple(found), outs)


def strategies_of(call: Call) -> list[Strategy]:
    """Every strategy of the call's rule; of a list op, each group's in turn with the other groups replicated, and all together."""
    entry = rule_for(call.op)
    assert entry is not None
    found = list(entry.rule(call))
    if not found or type(found[0]) is Strategy:
        return found  # type: ignore[return-value]
    return list(_spread(call, found))  # type: ignore[arg-type]


def _spread(call: Call, groups: list[Group]) -> Iterator[Strategy]:
    most = max(len(g.strategies) for g in groups)
    for which in [[g] for g in groups[:3]] + [groups]:
        for k in range(most):
            inputs: list[Placement] = [REPLICATE] * len(call.inputs)
            outputs = [None if o is None else REPLICATE for o in call.outputs]
            local = finish = None
            for group in which:
                if k < len(group.strategies):
                    strategy = group.strategies[k]
                    local, finish = local or strategy.local, finish or strategy.finish
                    for i, p in zip(group.inputs, strategy.inputs, strict=True):
                        inputs[i] = p
                    for o, p in zip(group.outputs, strategy.outputs, strict=True):
                        outputs[o] = p
            yield Strategy(tuple(inputs), tuple(outputs), local=local, finish=finish)


def check(
    sample: Sample, mesh_shape: tuple[int, ...], chosen: Sequence[Strategy], whole: tuple[list[Any], list[torch.Tensor]]
) -> bool:
    """Run ``sample`` under one strategy an axis and compare. False: the strategies may not stand together.

    Raises:
        AssertionError: a wrong result.
    """
    expected, after = whole
    call = call_of(sample, expected)
    if any(is_partial(p) and t.dtype == torch.bool for s in chosen for p, t in zip(s.inputs, call.inputs, strict=True)):
        return False  # no sum of bools is ever pending
    if any(s.inputs[i] is not s.outputs[o] for i, o in _aliased(sample, call) for s in chosen):
        return False
    if not legal(chosen, [t.shape for t in call.inputs], mesh_shape):
        return False
    mesh = DeviceMesh("cpu", torch.arange(torch.Size(mesh_shape).numel()).reshape(mesh_shape))
    entry = rule_for(sample.op)
    assert entry is not None
    local = next((s.local for s in chosen if s.local), None)
    finish = next((s.finish for s in chosen if s.finish), None)
    placed_in = [[s.inputs[i] for s in chosen] for i in range(len(call.inputs))]
    placed_out = [None if o is None else [s.outputs[i] for s in chosen] for i, o in enumerate(call.outputs)]
    coordinates = list(itertools.product(*map(range, mesh_shape)))
    pieces = [split(t, p, mesh_shape, sample.special) for t, p in zip(inputs_of(sample), placed_in, strict=True)]
    out_layouts = [(p, o.shape) for p, o in zip(placed_out, call.outputs, strict=True) if o is not None]
    in_layouts = [(p, t.shape) for p, t in zip(placed_in, call.inputs, strict=True)]
    results: dict[tuple[int, ...], list[Any]] = {}
    heres = {}
    for at in coordinates:
        queue = iter([piece[at] for piece in pieces])
        here = heres[at] = Here(mesh, at, torch.device("cpu"), in_layouts, out_layouts)
        args, kwargs = tree(sample.args, lambda t: next(queue)), tree(sample.kwargs, lambda t: next(queue))  # noqa: B023
        args, kwargs = localise(call, args, kwargs, entry.local_shapes, placed_out, mesh_shape, at)
        with torch.no_grad():
            raw = sample.op(*args, **kwargs) if local is None else DEVICE_FUNCTIONS[local](here, *args, **kwargs)
        results[at] = tensors(raw)
    if finish is not None:
        wholes = {
            i: merge({at: r[i] for at, r in results.items()}, p, mesh_shape, call.outputs[i].shape)
            for i, p in enumerate(placed_out)
            if p
        }
        placed_out = [p and [REPLICATE if is_partial(q) else q for q in p] for p in placed_out]
        out_layouts = [(p, o.shape) for p, o in zip(placed_out, call.outputs, strict=True) if o is not None]
        plain = tree(sample.args, lambda t: None), tree(sample.kwargs, lambda t: None)
        for at in coordinates:
            mine = [cut(w, placed_out[i], mesh_shape, at) for i, w in wholes.items()]
            here = Here(mesh, at, torch.device("cpu"), in_layouts, out_layouts)
            results[at] = tensors(DEVICE_FUNCTIONS[finish](here, mine, *plain[0], **plain[1]))
    allowed = _tolerance(sample, call)
    for i, placements in enumerate(placed_out):
        if placements is not None and i not in UNDEFINED.get(sample.op, ()):
            same(
                merge({at: r[i] for at, r in results.items()}, placements, mesh_shape, expected[i].shape),
                expected[i],
                f"output {i}",
                allowed,
            )
    for i, placements in enumerate(placed_in):
        same(merge(pieces[i], placements, mesh_shape, after[i].shape), after[i], f"input {i} afterwards", allowed)
    return True


def shuffled(t: torch.Tensor, placement: Any, order: dict[int, torch.Tensor]) -> torch.Tensor:
    """``t`` with the indices of the dim that ``placement`` shards in another order, one for each size."""
    if not is_shard(placement):
        return t.clone()
    dim = placement.dim
    generator = torch.Generator().manual_seed(t.shape[dim])
    order.setdefault(t.shape[dim], torch.randperm(t.shape[dim], generator=generator))
    return torch.empty_like(t).copy_(t.index_select(dim, order[t.shape[dim]]))


def check_shuffled(sample: Sample, strategy: Strategy, whole: tuple[list[Any], list[torch.Tensor]]) -> None:
    """Run ``sample`` with all dims that ``strategy`` shards shuffled alike: so must the results be.

    Raises:
        AssertionError: they are not.
    """
    order: dict[int, torch.Tensor] = {}
    queue = iter([shuffled(t, p, order) for t, p in zip(inputs_of(sample), strategy.inputs, strict=True)])
    again = Sample(
        sample.op, tree(sample.args, lambda t: next(queue)), tree(sample.kwargs, lambda t: next(queue)), sample.special
    )
    allowed = _tolerance(sample, call_of(sample, whole[0]))
    found, after = run_whole(again)
    for i, (o, expected, placement) in enumerate(zip(found, whole[0], strategy.outputs, strict=True)):
        if expected is not None and placement is not None and i not in UNDEFINED.get(sample.op, ()):
            same(o, shuffled(expected, placement, order), f"output {i}", allowed)
    for i, (t, expected, placement) in enumerate(zip(after, whole[1], strategy.inputs, strict=True)):
        same(t, shuffled(expected, placement, order), f"input {i} afterwards", allowed)


def _aliased(sample: Sample, call: Call) -> list[tuple[int, int]]:
    """(input, output) pairs that are one tensor."""
    written = [a.name for a in sample.op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found = _aliased_outputs(call, {t.index for name in written for t in _flat(call.get(name))})
    return [(i, o) for i, o in found.items() if o is not None]


def _flat(value: Any) -> list[TensorArg]:
    return [value] if isinstance(value, TensorArg) else list(value or ())


def localise(
    call: Call, args: Any, kwargs: Any, local_shapes: dict[str, int], placed_out: Any, mesh_shape: Any, at: Any
) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = list(args), dict(kwargs)
    for name, output in local_shapes.items():
        if call.outputs[output] is None:
            continue
        shape = local_shape(placed_out[output], mesh_shape, at, call.outputs[output].shape)  # type: ignore[union-attr]
        for position, argument in enumerate(call.op._schema.arguments):
            if argument.name == name:
                if position < len(args):
                    args[position] = list(shape)
                elif name in kwargs:
                    kwargs[name] = list(shape)
    return args, kwargs


def split(
    t: torch.Tensor, placements: Sequence[Placement], mesh_shape: tuple[int, ...], special: bool
) -> dict[tuple[int, ...], torch.Tensor]:
    """What each device holds; a Partial becomes random addends, or where values are ``special`` multiples of them."""
    add_up = multiples if special else addends
    held: dict[tuple[int, ...], torch.Tensor] = {(): t.detach()}
    for placement, pieces in zip(placements, mesh_shape, strict=True):
        deeper = {}
        for at, value in held.items():
            parts = add_up(value, pieces) if is_partial(placement) else [value] * pieces
            deeper.update({(*at, k): part for k, part in enumerate(parts)})
        held = deeper
    return {at: cut(value, placements, mesh_shape, at) for at, value in held.items()}


def cut(t: torch.Tensor, placements: Any, mesh_shape: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    if any(map(is_packed, placements)):
        shape, plain = opened(placements, mesh_shape, t.shape)
        return cut(t.reshape(shape), plain, mesh_shape, at).reshape(local_shape(placements, mesh_shape, at, t.shape))
    box = local_box(placements, mesh_shape, at, t.shape)
    return dense(t[tuple(slice(*r) for r in box)])


def opened(placements: Any, mesh_shape: tuple[int, ...], shape: Sequence[int]) -> tuple[torch.Size, Any]:
    """A shape in which no dim is packed, and its placements."""
    mesh = DeviceMesh("cpu", torch.arange(torch.Size(mesh_shape).numel()).reshape(mesh_shape))
    spec = Spec.of(mesh, placements, shape, None, torch.float32)
    fine = packing.unpacked(spec, spec)
    assert fine is not None
    return fine[0].shape, fine[0].placements


def addends(t: torch.Tensor, count: int) -> list[torch.Tensor]:
    """The same ones every time, so that replicas of a pending sum stay replicas."""
    generator = torch.Generator().manual_seed(t.numel())
    assert t.dtype != torch.bool, "a bool cannot be pending"
    if t.dtype.is_floating_point or t.dtype.is_complex:
        rest = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for _ in range(count - 1)]
    else:
        rest = [
            torch.randint(0, 5, t.shape, generator=generator, dtype=torch.int64).to(t.dtype) for _ in range(count - 1)
        ]
    last = t
    for part in rest:
        last = last - part
    return [last, *rest]


def multiples(t: torch.Tensor, count: int) -> list[torch.Tensor]:
    """2t, -t or the like, which add up exactly. What is not finite is on one device; the others hold something."""
    factors = [2, -1] if count % 2 == 0 else [2, -2, 1] if count > 1 else [1]
    factors += [2, -2] * ((count - len(factors)) // 2)
    whole = t.isfinite()
    return [torch.where(whole, t * k, t if i == 0 else torch.ones_like(t) * k) for i, k in enumerate(factors)]


def merge(
    parts: dict[tuple[int, ...], torch.Tensor], placements: Any, mesh_shape: tuple[int, ...], shape: Sequence[int]
) -> torch.Tensor:
    """The whole value of what the devices hold."""
    if any(map(is_packed, placements)):
        fine, plain = opened(placements, mesh_shape, shape)
        parts = {at: part.reshape(local_shape(plain, mesh_shape, at, fine)) for at, part in parts.items()}
        return merge(parts, plain, mesh_shape, fine).reshape(tuple(shape))
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    for at, part in parts.items():
        wanted = local_shape(placements, mesh_shape, at, shape)
        assert tuple(part.shape) == wanted, f"device {at} holds {tuple(part.shape)}, its layout says {wanted}"
        key = tuple(0 if is_partial(p) else k for p, k in zip(placements, at, strict=True))
        op = next((p.reduce_op for p in placements if is_partial(p)), None)
        sums[key] = part if key not in sums else REDUCTIONS[op](sums[key], part)  # type: ignore[index]
    first = next(iter(sums.values()))
    whole = torch.empty(tuple(shape), dtype=first.dtype)
    for at, part in sums.items():
        whole[tuple(slice(*r) for r in local_box(placements, mesh_shape, at, shape))] = part
    for at, part in sums.items():
        box = tuple(slice(*r) for r in local_box(placements, mesh_shape, at, shape))
        if not torch.equal(whole[box], part):  # which NaNs are not
            torch.testing.assert_close(whole[box], part, rtol=0, atol=0, equal_nan=True, msg="replicas differ")
    return whole


TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-4, torch.complex64: 2e-4}


def _tolerance(sample: Sample, call: Call) -> tuple[float, float]:
    """(relative, absolute): what the least precise dtype allows; among huge values, absolutely nothing is known of the rest."""
    dtypes = [t.dtype for t in (*call.inputs, *call.outputs) if t is not None]
    allowed = max(TOLERANCE.get(d, 3e-2 if d.is_floating_point else 1e-8) for d in dtypes)
    largest = max([1.0, *(_largest(t) for t in inputs_of(sample))]) if sample.special else 1.0
    return allowed, allowed * largest


def _largest(t: torch.Tensor) -> float:
    """The largest finite magnitude."""
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() and finite.dtype != torch.bool else 0.0


def same(found: torch.Tensor, expected: torch.Tensor, what: str, allowed: tuple[float, float]) -> None:
    """Equal up to ``allowed``; what is infinite or undefined exactly so."""
    torch.testing.assert_close(
        found,
        expected,
        rtol=allowed[0],
        atol=allowed[1],
        equal_nan=True,
        check_stride=False,
        msg=lambda m: f"{what}: {m}",
    )
