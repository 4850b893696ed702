"""The placed tensors that a function may use from outside, as they were before the call that is recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..client.values import Value
from ..sharding.spec import Spec
from ..tensor import Tensor
from .outside import Edge, Outside


class Outer:
    """Handles from outside, each once though it may be in several places: tensors of the arguments first.

    ``values`` and ``specs`` are what they referred to before the call, ``graphs`` their autograd nodes. By a value's number,
    ``index_of_value`` has the first handle on it.
    """

    def __init__(self, given: Iterable[torch.Tensor], before: Outside) -> None:
        self.handles: list[Any] = []
        self.values: list[Value] = []
        self.specs: list[Spec] = []
        self.graphs: list[Any] = []
        self.index_of_value: dict[int, int] = {}
        self._generations: dict[int, int] = {}
        self._edges: dict[int, Edge] = {}
        for edge, child in before.edges.values():
            if isinstance(child, torch.Tensor):
                self._edges.setdefault(id(child), edge)
        every = {id(tensor): tensor for tensor in (*given, *[child for _, child in before.edges.values()])}
        for tensor in every.values():
            if type(tensor) is Tensor and tensor._spec is not None:
                self._add(tensor)

    def _add(self, tensor: Any) -> None:
        value = tensor._value
        self.index_of_value.setdefault(value.id, len(self.handles))
        self.handles.append(tensor)
        self.values.append(value)
        self.specs.append(tensor._spec)
        self.graphs.append(tensor.grad_fn)
        self._generations[id(value.root)] = value.root.generation

    def edge_of(self, tensor: Any) -> Edge:
        """A place where a tensor from outside was."""
        return self._edges[id(tensor)]

    def roots(self) -> list[tuple[Any, int]]:
        """The memory of them all, with its generation before the call."""
        return [(root, self._generations[id(root)]) for root in {id(v.root): v.root for v in self.values}.values()]

    def written(self) -> set[int]:
        """The indices of those that have been written in place since."""
        return {i for i, v in enumerate(self.values) if v.root.generation != self._generations[id(v.root)]}

    def are_in_other_graphs(self) -> bool:
        """Whether autograd has given any another node since."""
        return any(t.grad_fn is not graph for t, graph in zip(self.handles, self.graphs, strict=True))
