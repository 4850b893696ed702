"""The checks of one OpInfo: forward under each grad mode, backward, twice backward, in place, and ``out=``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from . import memory
from .adapters import Adapter
from .checks import Body, Check, Grid, Place, arguments, compare, first_line, gradients
from .compare import Tolerance
from .outcome import Outcome
from .samples import Sample, of_op

CHECKS = (
    "forward",
    "no_grad",
    "inference",
    "backward",
    "gradgrad",
    "inplace",
    "inplace_backward",
    "out",
    *memory.MODES,
)
NEED_GRADIENTS = ("backward", "gradgrad", "inplace_backward")

UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Ops that promise no values."""

SECOND_DTYPES = (torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool)

MODES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "forward": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "inplace": torch.no_grad,
    "out": torch.no_grad,
}


def database() -> list[Any]:
    """PyTorch's OpInfos that run on CPU (those of the CUDA compiler at run time claim to)."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supported_dtypes("cpu") and not op.name.startswith("jiterator")]


def dtypes(op: Any, chosen: tuple[str, ...]) -> list[torch.dtype]:
    """The dtypes to try: float32 or the nearest thing to it, then those of ``chosen`` that ``op`` has (``all`` for each)."""
    supported = op.supported_dtypes("cpu")
    first = next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in supported), None)
    found = [first or sorted(supported, key=str)[0]]
    for dtype in SECOND_DTYPES:
        if dtype in supported and dtype not in found and ("all" in chosen or str(dtype)[6:] in chosen):
            found.append(dtype)
    return found


def run(op: Any, adapter: Adapter, grid: Grid) -> Iterator[Outcome]:
    """Every outcome of ``op`` over ``grid``; a dtype after the first gets one sample."""
    for position, dtype in enumerate(dtypes(op, grid.dtypes)):
        limit = grid.sample_limit if position == 0 else 1
        differentiable = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
        for requires_grad in (False, True) if differentiable else (False,):
            kinds = [kind for kind in grid.checks if (kind in NEED_GRADIENTS) == requires_grad]
            if not kinds:
                continue
            try:
                samples = of_op(op, dtype, requires_grad, limit)
            except Exception as error:
                yield Outcome(
                    op.formatted_name, "skipped", kinds[0], str(dtype)[6:], detail=f"samples: {first_line(error)}"
                )
                continue
            for number, sample in enumerate(samples):
                for kind in kinds:
                    body = _body(op, kind, sample)
                    if body is not None:
                        check = Check(
                            name=op.formatted_name,
                            kind=kind,
                            body=body,
                            tensors=sample.tensors(),
                            dtype=str(dtype)[6:],
                            sample=number,
                            values=op.name not in UNINITIALISED,
                            strides=kind not in NEED_GRADIENTS,
                            floor=_floor(op, dtype),
                            plain_too=kind not in memory.MODES,
                        )
                        yield from compare(check, adapter, grid)


def _body(op: Any, kind: str, sample: Sample) -> Body | None:
    """The call of check ``kind``, or None where the op or sample has no such thing."""
    tensors = sample.tensors()
    if kind == "backward":
        return (lambda place: _backward(op.op, sample, place)) if any(t.requires_grad for t in tensors) else None
    if kind == "gradgrad":
        if not (op.supports_gradgrad and any(t.requires_grad for t in tensors)):
            return None
        return lambda place: _gradgrad(op.op, sample, place)
    if kind in ("inplace", "inplace_backward"):
        variant = op.inplace_variant
        if variant is None or sample.broadcasts_input or not (tensors and tensors[0] is sample.args[0]):
            return None
        if kind == "inplace":
            return lambda place: _inplace(variant, sample, place)
        if not (op.supports_inplace_autograd and tensors[0].requires_grad):
            return None
        return lambda place: _backward(
            lambda first, *rest, **named: variant(first.clone(), *rest, **named), sample, place
        )
    if kind == "out":
        return (lambda place: _out(op, sample, place)) if op.supports_out and tensors else None
    if kind in memory.MODES:
        return (lambda place: memory.sharing(op.op, memory.MODES[kind], sample, place)) if tensors else None
    return lambda place: _forward(op, MODES[kind], sample, place)


def _forward(op: Any, mode: Callable, sample: Sample, place: Any) -> Any:
    args, kwargs = arguments(sample, place)
    is_factory = not sample.tensors() and "device" in kwargs and getattr(torch, op.name, None) is op.op
    with mode():
        return (place.factory(op.op) if is_factory else op.op)(*args, **kwargs)


def _backward(function: Callable, sample: Sample, place: Place) -> Any:
    with torch.enable_grad():
        outputs, leaves = _forward_of_leaves(function, sample, place)
        return outputs, gradients(outputs, leaves, place)


def _gradgrad(function: Callable, sample: Sample, place: Place) -> Any:
    """The gradients, and theirs with respect to the inputs and to the gradients that came in."""
    with torch.enable_grad():
        outputs, leaves = _forward_of_leaves(function, sample, place)
        came_in: list[torch.Tensor] = []

        def place_leaf(tensor: torch.Tensor) -> torch.Tensor:
            came_in.append(place(tensor).requires_grad_())
            return came_in[-1]

        first = gradients(outputs, leaves, place_leaf, create_graph=True)
        twice = any(one is not None and one.requires_grad for one in first)
        return first, gradients(first, [*leaves, *came_in], place) if twice else None


def _forward_of_leaves(function: Callable, sample: Sample, place: Place) -> tuple[Any, list[torch.Tensor]]:
    """What the sample gives, and its arguments that want a gradient."""
    args, kwargs = arguments(sample, place, requires_grad=True)
    flat = tree_flatten((args, kwargs))[0]
    leaves = [leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return sample.output(function(*args, **kwargs)), leaves


def _inplace(variant: Callable, sample: Sample, place: Any) -> Any:
    args, kwargs = arguments(sample, place)
    target, before, shown = args[0], place.layout_of(args[0]), _geometry(args[0])
    with torch.no_grad():
        returned = variant(*args, **kwargs)
    # An op like transpose_ turns the handle itself; any other writes where the values are.
    kept = place.layout_of(target) == before or _geometry(target) != shown
    return returned, target, "placements kept" if kept else "placements changed"


def _geometry(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.stride()


def _out(op: Any, sample: Sample, place: Place) -> Any:
    with torch.no_grad():
        args, kwargs = arguments(sample, lambda tensor: tensor.detach().clone())
        whole = op.op(*args, **kwargs)
        args, kwargs = arguments(sample, place)
        targets = tree_map(
            lambda leaf: place(torch.zeros_like(leaf)) if isinstance(leaf, torch.Tensor) else leaf, whole
        )
        out = tuple(targets) if isinstance(targets, (tuple, list)) else targets
        returned = op.op(*args, **kwargs, out=out)
    return returned, out


def _floor(op: Any, dtype: torch.dtype) -> Tolerance:
    """The loosest tolerance that the database itself asks for."""
    from torch.testing._internal.common_device_type import toleranceOverride

    pairs = [
        (override[dtype].rtol, override[dtype].atol)
        for decorator in op.decorators
        for inner in getattr(decorator, "decorators", [decorator])
        if isinstance(inner, toleranceOverride) and dtype in (override := inner.d)
    ]
    return (max((r for r, _ in pairs), default=0.0), max((a for _, a in pairs), default=0.0))
