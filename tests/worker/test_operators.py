"""An op's name leads to that op, whichever callable stands for it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.worker.operators import BUILTINS, resolve

X = torch.rand(2, 2) + 1
INDEX = torch.tensor([0, 1])
#: Arguments where a tensor of two by two, and numbers, will not do.
ARGUMENTS = {
    "aten.where.self": (X > 1, X, X),
    "aten.bmm.default": (X[None], X[None]),
    "aten.embedding.default": (X, INDEX),
    "aten._softmax.default": (X, 1, False),
    "aten._log_softmax.default": (X, 1, False),
    "aten.cat.default": ([X, X], 1),
    "aten.index_select.default": (X, 0, INDEX),
    "aten.masked_fill.Scalar": (X, X > 1, 2),
    "aten.masked_fill.Tensor": (X, X > 1, torch.tensor(2.0)),
    "aten.permute.default": (X, [1, 0]),
    "aten.transpose.int": (X, 0, 1),
    "aten.select.int": (X, 0, 1),
    "aten.narrow.default": (X, 0, 1, 1),
    "aten.view.default": (X, [4]),
    "aten.expand.default": (X, [3, 2, 2]),
    "aten.bitwise_not.default": (INDEX,),
    "aten.bitwise_and.Tensor": (INDEX, INDEX),
    "aten.bitwise_or.Tensor": (INDEX, INDEX),
    "aten.clamp.default": (X, 0, 1),
    "aten.native_layer_norm.default": (X, [2], None, None, 1e-5),
    "aten.linear.default": (X, X, None),
}
#: Made of others: dispatch never shows them.
COMPOSITE = {"aten.matmul.default", "aten.narrow.default", "aten.linear.default", "aten.square.default"}


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def sample(argument):
    return X.clone() if str(argument.type) == "Tensor" else 1


@pytest.mark.parametrize("name", BUILTINS)
def test_a_builtin_is_its_overload(name):
    op = resolve(name)
    required = [a for a in op._schema.arguments if not a.has_default_value() and not a.kwarg_only]
    arguments = ARGUMENTS.get(name) or tuple(sample(a) for a in required)
    with Called() as called:
        result = BUILTINS[name](*arguments)
    assert called.ops == [op] or name in COMPOSITE
    again = ARGUMENTS.get(name) or tuple(sample(a) for a in required)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (result, op(*again))), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", ["os.system.default", "c10d.barrier.default", "aten.add.nothing", "aten.nothing.default", "aten", ""]
)
def test_only_registered_ops_of_allowed_namespaces(name):
    with pytest.raises(ValueError, match="op"):
        resolve(name)
