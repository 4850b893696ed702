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
    pending = [following for node in nodes for following, _ in node.next_functions]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node in nodes:
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False


def reached(outputs: list[Any], inputs: list[Any]) -> list[set[int]]:
    """For each output, the inputs that its graph leads to."""
    ends: dict[Any, set[int]] = {}
    for at, one in enumerate(inputs):
        ends.setdefault(torch.autograd.graph.get_gradient_edge(one).node, set()).add(at)
    found = []
    for output in outputs:
        seen, pending, inside = set(), [output.grad_fn], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            inside |= ends.get(node, set())
            pending += [following for following, _ in node.next_functions]
        found.append(inside)
    return found


@contextmanager
def without_hooks(tensors: list[Any]) -> Iterator[None]:
    """Without the user's hooks on gradients, and with each ``grad`` that `retain_grad` keeps as it was: torch calls and fills them when it
    gets gradients from our node."""
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
