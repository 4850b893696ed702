"""What torch refuses is refused at the call, with torch's own type and text: the expected error comes from plain CPU torch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard

pytestmark = pytest.mark.usefixtures("simulated")


def f(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def i(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def d(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


MISTAKES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "mm": (torch.mm, [f(4, 6), f(3, 3)]),
    "mm of 3 dims": (torch.mm, [f(2, 4, 6), f(3, 3)]),
    "matmul": (lambda a, b: a @ b, [f(4, 6), f(3, 3)]),
    "matmul of vectors": (lambda a, b: a @ b, [f(4), f(3)]),
    "matmul of a matrix and a vector": (lambda a, b: a @ b, [f(4, 3), f(4)]),
    "matmul of batches": (torch.matmul, [f(2, 4, 6), f(3, 6, 3)]),
    "bmm": (torch.bmm, [f(2, 4, 6), f(2, 3, 3)]),
    "addmm": (torch.addmm, [f(3, 3), f(4, 6), f(6, 3)]),
    "dtypes of mm": (torch.mm, [f(4, 6), d(6, 3)]),
    "dtypes of bmm": (torch.bmm, [f(2, 4, 6), d(2, 6, 3)]),
    "mm of float and int": (torch.mm, [f(4, 6), i(6, 3)]),
    "linear": (F.linear, [f(4, 6), f(3, 3)]),
    "linear of 3 dims": (F.linear, [f(2, 4, 6), f(3, 3)]),
    "bias of linear": (F.linear, [f(4, 6), f(3, 6), f(4)]),
    "dtypes of linear": (F.linear, [f(4, 6), d(3, 6)]),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), [f(4, 6), f(3, 3)]),
    "broadcast": (lambda a, b: a + b, [f(4, 6), f(3, 6)]),
    "broadcast of the last dim": (lambda a, b: a * b, [f(4, 6), f(4)]),
    "broadcast in place": (lambda a, b: a.add_(b), [f(6), f(3, 6)]),
    "where": (lambda a, b: torch.where(a > 0, a, b), [f(4, 6), f(4)]),
    "masked_fill": (lambda a: a.masked_fill(a, 1), [f(4, 6)]),
    "copy_": (lambda a, b: a.copy_(b), [f(4, 6), f(3, 6)]),
    "float into int": (lambda a: a.add_(1.5), [i(4, 6)]),
    "bitwise and of floats": (lambda a, b: a & b, [f(4, 6), f(4, 6)]),
    "minus a bool": (lambda a: -(a > 0), [f(4)]),
    "a string": (lambda a: a + "x", [f(4)]),
    "cat": (lambda a, b: torch.cat([a, b]), [f(4, 6), f(4, 3)]),
    "cat of other ranks": (lambda a, b: torch.cat([a, b]), [f(4, 6), f(4)]),
    "dim of cat": (lambda a, b: torch.cat([a, b], 2), [f(4, 6), f(4, 6)]),
    "stack": (lambda a, b: torch.stack([a, b]), [f(4, 6), f(4, 3)]),
    "dim of stack": (lambda a, b: torch.stack([a, b], 5), [f(4), f(4)]),
    "view": (lambda a: a.view(5, 5), [f(4, 6)]),
    "view with -1": (lambda a: a.view(-1, 5), [f(4, 6)]),
    "view with two -1": (lambda a: a.view(-1, -1), [f(4, 6)]),
    "view of a transpose": (lambda a: a.t().view(24), [f(4, 6)]),
    "reshape": (lambda a: a.reshape(5, 5), [f(4, 6)]),
    "transpose": (lambda a: a.transpose(0, 2), [f(4, 6)]),
    "permute": (lambda a: a.permute(0, 0), [f(4, 6)]),
    "unsqueeze": (lambda a: a.unsqueeze(4), [f(4, 6)]),
    "expand": (lambda a: a.expand(3, 6), [f(4, 6)]),
    "expand to fewer dims": (lambda a: a.expand(6), [f(4, 6)]),
    "split": (lambda a: a.split([1, 2]), [f(4, 6)]),
    "chunk": (lambda a: a.chunk(0), [f(4, 6)]),
    "narrow": (lambda a: a.narrow(0, 3, 3), [f(4, 6)]),
    "unflatten": (lambda a: a.unflatten(1, (4, 2)), [f(4, 6)]),
    "index": (lambda a: a[7], [f(4, 6)]),
    "negative index": (lambda a: a[-5], [f(4, 6)]),
    "index of the second dim": (lambda a: a[0, 9], [f(4, 6)]),
    "too many indices": (lambda a: a[0, 0, 0], [f(4, 6)]),
    "index of a 0-d tensor": (lambda a: a[0], [f()]),
    "index by a string": (lambda a: a["x"], [f(4)]),
    "index by a float": (lambda a: a[1.5], [f(4)]),
    "negative step": (lambda a: a[::-1], [f(4)]),
    "indices that do not broadcast": (lambda a: a[torch.tensor([0, 1]), torch.tensor([0, 1, 2])], [f(4, 6)]),
    "mask of another size": (lambda a: a[torch.ones(3, dtype=torch.bool)], [f(4, 6)]),
    "write by a mask of another size": (lambda a: a.__setitem__(torch.ones(3, dtype=torch.bool), 1.0), [f(4, 6)]),
    "write out of range": (lambda a: a.__setitem__(9, 1.0), [f(4, 6)]),
    "write of another size": (lambda a: a.__setitem__(0, torch.ones(3)), [f(4, 6)]),
    "gather": (lambda a: a.gather(0, i(5, 9)), [f(4, 6)]),
    "gather by floats": (lambda a: a.gather(0, torch.zeros(2, 2)), [f(4, 6)]),
    "index_select by floats": (lambda a: a.index_select(0, torch.zeros(2)), [f(4, 6)]),
    "dim of index_select": (lambda a: a.index_select(3, i(2)), [f(4, 6)]),
    "index_add": (lambda a: a.index_add(0, i(2), torch.ones(3, 6)), [f(4, 6)]),
    "embedding by floats": (lambda w: F.embedding(torch.zeros(2), w), [f(4, 6)]),
    "softmax": (lambda a: torch.softmax(a, 3), [f(4, 6)]),
    "softmax of ints": (lambda a: torch.softmax(a, 0), [i(4, 6)]),
    "dim of sum": (lambda a: a.sum(3), [f(4, 6)]),
    "dims of sum twice": (lambda a: a.sum((0, 0)), [f(4, 6)]),
    "mean of ints": (lambda a: a.mean(), [i(4, 6)]),
    "dim of max": (lambda a: a.max(4), [f(4, 6)]),
    "max of nothing": (lambda a: a.max(), [f(0, 6)]),
    "argmax of nothing": (lambda a: a.argmax(0), [f(0, 6)]),
    "dim of cumsum": (lambda a: a.cumsum(3), [f(4, 6)]),
    "dim of sort": (lambda a: a.sort(3), [f(4, 6)]),
    "k of topk": (lambda a: a.topk(9), [f(4, 6)]),
    "conv2d": (F.conv2d, [f(1, 3, 8, 8), f(4, 2, 3, 3)]),
    "conv2d of a large kernel": (F.conv2d, [f(1, 3, 2, 2), f(4, 3, 3, 3)]),
    "bias of conv2d": (F.conv2d, [f(1, 3, 8, 8), f(4, 3, 3, 3), f(3)]),
    "dtypes of conv2d": (F.conv2d, [f(1, 3, 8, 8), d(4, 3, 3, 3)]),
    "stride of conv2d": (lambda a, w: F.conv2d(a, w, stride=0), [f(1, 3, 8, 8), f(4, 3, 3, 3)]),
    "max_pool2d": (lambda a: F.max_pool2d(a, 9), [f(1, 2, 4, 4)]),
    "pad": (lambda a: F.pad(a, (9, 9), mode="reflect"), [f(1, 4, 6)]),
    "layer_norm": (lambda a: F.layer_norm(a, (5,)), [f(4, 6)]),
    "weight of layer_norm": (lambda a, w: F.layer_norm(a, (6,), w), [f(4, 6), f(5)]),
    "batch_norm": (F.batch_norm, [f(4, 6), f(5), f(5)]),
    "cross_entropy": (lambda a: F.cross_entropy(a, i(3)), [f(4, 6)]),
    "mse_loss": (F.mse_loss, [f(4, 6), f(4, 5)]),
    "dropout": (lambda a: F.dropout(a, 2.0), [f(4, 6)]),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k), [f(1, 2, 4, 8), f(1, 2, 4, 6)]),
    "cholesky": (torch.linalg.cholesky, [f(4, 6)]),
    "complex": (lambda a, b: torch.complex(a, b), [f(4), d(4)]),
    "std of ints": (lambda a: a.std(), [i(4, 6)]),
    "var of ints along a dim": (lambda a: torch.var_mean(a, 0), [i(4, 6)]),
    "eq in place": (lambda a, b: a.eq_(b), [f(4, 1), f(4, 6)]),
    "abs of bools in place": (lambda a: (a > 0).abs_(), [f(4)]),
    "frac of bools": (lambda a: (a > 0).frac(), [f(4)]),
    "trace of bools": (lambda a: (a > 0).trace(), [f(4, 6)]),
    "a write to an expanded tensor": (lambda a: a.expand(3, 4, 6).remainder_(2), [f(4, 6)]),
    "values of an index": (lambda a, b: a.index_put_((i(2), i(1)), b), [f(4, 6), f(3)]),
    "values of an index between dims": (
        lambda a, b: a.__setitem__((slice(None), i(2), None), b),
        [f(4, 6), f(4, 3, 1)],
    ),
    "dtypes of an index": (lambda a, b: a.index_put_((i(2),), b), [f(4, 6), d(6)]),
    "dtypes of index_add_": (lambda a, b: a.index_add_(0, i(2), b), [f(4, 6), d(2, 6)]),
    "many indices of a 0-d tensor": (lambda a: a.index_select(0, i(4)), [f()]),
    "dtype of out": (lambda a, b: torch.neg(a, out=b), [i(4, 6), d(4, 6)]),
    "an input as too small an out": (lambda a, b: torch.mul(a, b, out=a), [f(6), f(4, 6)]),
    "t_ of 3 dims": (lambda a: a.t_(), [f(2, 3, 4)]),
    "mode of nothing": (lambda a: a.mode(-1), [f(4, 0)]),
    "cdist of halves": (torch.cdist, [f(4, 6, dtype=torch.bfloat16), f(4, 6, dtype=torch.bfloat16)]),
    "lengths of ctc_loss": (
        lambda a: F.ctc_loss(a, i(2, 3) + 1, torch.full((2,), 5.0), torch.full((2,), 3.0)),
        [f(5, 2, 4)],
    ),
    "clamp to nothing": (lambda a: a.clamp(), [f(4)]),
    "item of many": (lambda a: a.item(), [f(4)]),
    "bool of many": (bool, [f(4)]),
    "len of a 0-d tensor": (len, [f()]),
    "iteration over a 0-d tensor": (list, [f()]),
    "backward without a graph": (lambda a: a.sum().backward(), [f(4)]),
    "backward of many": (lambda a: (a.requires_grad_() * 2).backward(), [f(4)]),
    "a leaf written": (lambda a: a.requires_grad_().add_(1), [f(4)]),
    "ints with a gradient": (lambda a: a.requires_grad_(), [i(4)]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(-1)], ids=["replicated", "first", "last"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_error_is_torchs(mistake: str, placement: dtorch.Placement) -> None:
    call, tensors = MISTAKES[mistake]
    with pytest.raises(Exception) as expected:
        call(*[t.clone() for t in tensors])
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    ours = [dtorch.distribute_tensor(t, mesh, [placement if t.ndim else Replicate()]) for t in tensors]
    with pytest.raises(Exception) as raised:
        call(*ours)
    assert type(raised.value) is type(expected.value)
    assert str(raised.value) == str(expected.value)
    assert raised.value.__context__ is None  # one traceback, not how we found out
    dtorch.synchronize()  # and nothing went wrong later, on a worker


def test_an_error_keeps_nothing_alive() -> None:
    class Local:
        pass

    def wrong() -> weakref.ref:
        local = Local()
        with pytest.raises(RuntimeError):
            dtorch.ones(4, 6, device_mesh=dtorch.DeviceMesh("cpu", [0, 1])) @ dtorch.ones(4, 6)
        return weakref.ref(local)

    gc.collect()
    gc.disable()
    try:
        assert wrong()() is None
    finally:
        gc.enable()
