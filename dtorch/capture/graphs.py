"""What autograd's graph says of the tensors of a recorded call, and what hangs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..client.leaves import Leaf
from ..client.torch_internals import set_grad


def depend(tensors: list[Any]) -> bool:
    """Whether one of the tensors was computed from another: its gradient would be in that one's already, and be added to it once more."""
    nodes = {torch.autograd.graph.get_gradient_edge(one).node for one in tensors}
    return any(node in nodes for node in _from([following for node in nodes for following, _ in node.next_functions]))


def reached(outputs: list[Any], inputs: list[Any]) -> list[set[int]]:
    """For each output, the inputs that its graph leads to."""
    ends: dict[Any, set[int]] = {}
    for at, one in enumerate(inputs):
        ends.setdefault(torch.autograd.graph.get_gradient_edge(one).node, set()).add(at)
    return [set().union(*[ends[node] for node in _from([output.grad_fn]) if node in ends]) for output in outputs]


def _from(nodes: list[Any]) -> Iterator[Any]:
    """These nodes and all that they lead to, each once."""
    pending, seen = list(nodes), {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


@contextmanager
def without_hooks(tensors: list[Any]) -> Iterator[None]:
    """Without the user's hooks on gradients, and what `retain_grad` keeps stays: torch sees to both when our node gives gradients."""
    removed = []
    retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
    for tensor, _ in retained:
        set_grad(tensor, None)
    for tensor in tensors:
        hooks = tensor._backward_hooks
        for number, hook in list((hooks or {}).items()):
            if not isinstance(hook, Leaf):
                removed.append((hooks, number, hook))
                del hooks[number]
    try:
        yield
    finally:
        for hooks, number, hook in removed:
            hooks[number] = hook
        for tensor, grad in retained:
            set_grad(tensor, grad)
