"""`Fused` instructions: ops that torch's inductor compiles into one function, when they first run.

The first run calls torch's kernels one by one, as programs do, and makes a graph of what it calls; later runs call what was compiled
of that. Inputs of other shapes or strides, as a view's may be, are compiled for anew; those without elements are not compiled for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..program.ir import Const, Fused, LocalShape, Op, Operand, Program, Slot
from . import bindings
from .bindings import Maker, PoisonedInput, Site
from .damage import storage_id
from .operators import resolve
from .poison import Poison
from .restride import is_certainly_in_order, restride

aten = torch.ops.aten

#: Kinds of inputs that one instruction is compiled for; what is of another runs op by op.
KINDS = 8


def function_of(program: Program, fused: Fused) -> Maker:
    """``f(*inputs)``: the results of ``fused``."""
    return Maker(lambda site: _Function(program, fused, site))


class _Function:
    """One instruction on one device."""

    def __init__(self, program: Program, fused: Fused, site: Site) -> None:
        self._program = program
        self._fused = fused
        self._site = site
        self._compiled: dict[Any, Callable[..., Sequence[torch.Tensor]]] = {}

    def __call__(self, *inputs: Any) -> Sequence[torch.Tensor]:
        for tensor in inputs:
            if type(tensor) is Poison:
                raise PoisonedInput
        key = tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs])
        compiled = self._compiled.get(key)
        if compiled is not None:
            return compiled(*inputs)
        results, graph = self._run(inputs)
        if len(self._compiled) < KINDS and all(tensor.numel() for tensor in inputs):
            self._compiled[key] = _compile(graph, inputs, self._fused)
        return results

    def _run(self, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], fx.Graph]:
        """The results, and the graph of the ops that made them."""
        graph = fx.Graph()
        nodes: list[Any] = [graph.placeholder(f"x{index}") for index in range(len(inputs))]
        values: list[Any] = list(inputs)
        for op in self._fused.body:
            function = resolve(op.name)
            args, kwargs = self._arguments(op, values)
            result = function(*args, **kwargs)
            node = graph.call_function(function, *self._arguments(op, nodes))
            several = len(function._schema.returns) > 1
            for position, out in enumerate(op.outs):
                if out < 0:
                    continue
                value = result[position] if several else result
                made = graph.call_function(operator.getitem, (node, position)) if several else node
                order = op.orders[position] if position < len(op.orders) else None
                if order is not None and len(order) > 1 and not _is_in_order(value, order, inputs):
                    value, made = restride(value, order), _restrided(graph, made, order)
                values.append(value)
                nodes.append(made)
        graph.output([nodes[slot] for slot in self._fused.results])
        return [values[slot] for slot in self._fused.results], graph

    def _arguments(self, op: Op, known: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with what is ``known`` of each slot."""
        kwargs = {name: self._argument(arg, known) for name, arg in op.kwargs.items()}
        return tuple(self._argument(arg, known) for arg in op.args), kwargs

    def _argument(self, arg: Any, known: list[Any]) -> Any:
        if isinstance(arg, Slot):
            return known[arg.index]
        if isinstance(arg, Operand):
            return self._program.constant(arg)
        if isinstance(arg, LocalShape):
            shape = tuple(self._program.constant(arg.shape))
            return bindings.local_shape_of(self._program, arg).make(self._site)(shape)
        if isinstance(arg, Const):
            return bindings.constant(arg).make(self._site)
        if isinstance(arg, list):
            return [self._argument(item, known) for item in arg]
        return arg


def _is_in_order(value: torch.Tensor, order: list[int], inputs: Sequence[torch.Tensor]) -> bool:
    return storage_id(value) in {storage_id(t) for t in inputs} or is_certainly_in_order(value, order)


def _restrided(graph: fx.Graph, node: fx.Node, order: list[int]) -> fx.Node:
    """What `restride` does."""
    inverse = [order.index(dim) for dim in range(len(order))]
    node = graph.call_function(aten.permute.default, (node, list(order)))
    node = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    return graph.call_function(aten.permute.default, (node, inverse))


def by_inductor(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Sequence[torch.Tensor]]:
    """``module`` compiled for such inputs."""
    import torch._inductor as inductor  # 2 s, which only programs that ask for it take

    # One thread: more would be processes, which outlive the worker.
    return inductor.compile(module, list(inputs), options={"compile_threads": 1})  # type: ignore[return-value]


def _compile(graph: fx.Graph, inputs: Sequence[torch.Tensor], fused: Fused) -> Callable[..., Sequence[torch.Tensor]]:
    """What inductor makes of ``graph``, with results that share no memory with each other, with inputs or with the next call's.

    Raises:
        RuntimeError: inductor cannot compile it.
    """
    try:
        function = by_inductor(fx.GraphModule(torch.nn.Module(), graph), inputs)
        runs = [list(function(*inputs)) for _ in range(2)]
    except Exception as error:
        names = ", ".join(op.name for op in fused.body)
        raise RuntimeError(
            f"torch's inductor cannot compile {len(fused.body)} ops ({names}), {type(error).__name__}: {error}; "
            'leave backend="inductor" out of dtorch.compile(), or those ops out of the function'
        ) from error
    seen = {storage_id(tensor) for tensor in (*inputs, *runs[0])}
    shared = []
    for index, tensor in enumerate(runs[1]):
        if storage_id(tensor) in seen:
            shared.append(index)
        seen.add(storage_id(tensor))
    if not shared:
        return function

    def unshared(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        results = list(function(*tensors))
        for index in shared:
            results[index] = results[index].clone(memory_format=torch.preserve_format)
        return results

    return unshared
