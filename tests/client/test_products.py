"""Products of split tensors move nothing, however their dims are split, and are torch's: values and gradients of any order."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dtorch
from dtorch import Replicate, Shard

pytestmark = pytest.mark.usefixtures("simulated")

MESH = dtorch.init_device_mesh("cpu", (2, 3, 2), ("dp", "cp", "tp"))
S0, S1, S2, S3, R = Shard(0), Shard(1), Shard(2), Shard(3), Replicate()
linear, matmul = torch.nn.functional.linear, torch.matmul


def dot(*dims: list[int]) -> Callable[..., torch.Tensor]:
    return lambda a, b: torch.tensordot(a, b, dims=dims)


#: A product, the shapes of its operands, and where these are.
CASES: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[int, ...]], list[list[Any]]]] = {
    "linear, batch and sequence": (linear, [(4, 7, 6), (5, 6), (5,)], [[S0, S1, R], [R] * 3, [R] * 3]),
    "linear, no bias": (linear, [(4, 7, 6), (5, 6)], [[S0, S1, R], [R] * 3]),
    "linear, sequence twice": (linear, [(4, 7, 6), (5, 6), (5,)], [[S1, S1, R], [R] * 3, [R] * 3]),
    "linear, by columns": (linear, [(4, 7, 6), (5, 6), (5,)], [[S0, S1, R], [R, R, S0], [R, R, S0]]),
    "linear, by rows": (linear, [(4, 7, 6), (5, 6), (5,)], [[S0, S1, S2], [R, R, S1], [R] * 3]),
    "linear, all apart": (linear, [(4, 7, 6), (5, 6), (5,)], [[S1, S0, S2], [S0, S0, S1], [R, R, S0]]),
    "linear, uneven batch": (linear, [(3, 7, 6), (5, 6), (5,)], [[S0, R, R], [R] * 3, [R] * 3]),
    "linear, more dims": (linear, [(2, 3, 4, 6), (5, 6), (5,)], [[S2, S1, R], [R] * 3, [R] * 3]),
    "linear of a matrix": (linear, [(4, 6), (5, 6), (5,)], [[S0, R, R], [R, R, S0], [R, R, S0]]),
    "linear of a matrix, by rows": (linear, [(4, 6), (5, 6)], [[R, R, S1], [R, R, S1]]),
    "linear, whole": (linear, [(2, 3, 6), (5, 6), (5,)], [[R] * 3, [R] * 3, [R] * 3]),
    "heads, whole": (matmul, [(2, 4, 7, 6), (2, 4, 6, 5)], [[R] * 3, [R] * 3]),
    "heads, by heads": (matmul, [(2, 4, 7, 6), (2, 4, 6, 5)], [[S0, R, S1], [S0, R, S1]]),
    "sequence and a matrix": (matmul, [(4, 7, 6), (6, 5)], [[S0, S1, R], [R, R, S1]]),
    "sequence and a vector": (matmul, [(4, 7, 6), (6,)], [[S0, S1, R], [R] * 3]),
    "a vector and a stack": (matmul, [(6,), (4, 6, 7)], [[R] * 3, [R, S2, R]]),
    "a matrix and a stack": (matmul, [(5, 6), (4, 6, 7)], [[R, R, S0], [S2, S0, R]]),
    "heads": (matmul, [(2, 4, 7, 6), (2, 4, 6, 5)], [[S0, S1, S2], [S0, S1, R]]),
    "shared heads": (matmul, [(2, 4, 7, 6), (4, 6, 5)], [[S0, S1, R], [R, S0, R]]),
    "broadcast both ways": (matmul, [(2, 1, 7, 6), (3, 6, 5)], [[R, S2, R], [S0, R, S2]]),
    "contracted": (matmul, [(2, 4, 7, 6), (2, 4, 6, 5)], [[S1, R, S3], [S1, R, S2]]),
    "dims in another order": (dot([2, 0], [0, 1]), [(4, 7, 6), (6, 4, 5)], [[S1, S0, R], [S2, S1, R]]),
    "negative dims": (dot([-1], [-1]), [(4, 7, 6), (3, 5, 6)], [[S1, R, S2], [S1, R, S2]]),
}


def tensors(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def place(plain: list[torch.Tensor], where: Any) -> list[torch.Tensor]:
    return [dtorch.distribute_tensor(t, MESH, p).requires_grad_() for t, p in zip(plain, where, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("case", CASES)
def test_as_on_one_device(case: str, dtype: torch.dtype) -> None:
    """And twice: gradients of gradients, as a penalty on gradients needs them."""
    call, shapes, where = CASES[case]
    plain = [t.requires_grad_() for t in tensors(shapes, dtype)]
    placed = place([t.detach() for t in plain], where)
    found = []
    for ts in (plain, placed):
        out = call(*ts)
        grads = torch.autograd.grad(out.abs().square().sum(), ts, create_graph=True)
        again = torch.autograd.grad(sum(g.abs().square().sum() for g in grads), ts)
        found.append([out, *grads, *again])
    assert found[1][0].stride() == found[0][0].stride()
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours.detach().to_torch(), theirs.detach())


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", CASES)
def test_without_gradients(case: str, mode: Any) -> None:
    call, shapes, where = CASES[case]
    plain = tensors(shapes)
    with mode():
        torch.testing.assert_close(call(*place(plain, where)).detach().to_torch(), call(*plain))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_moves(mode: Any) -> None:
    def placed(case: str) -> Any:
        _, shapes, where = CASES[case]
        return place(tensors(shapes), where)

    x, weight, bias = placed("linear, by columns")
    sequence, matrix = placed("sequence and a matrix")
    q, k = placed("heads")
    uneven = placed("linear, uneven batch")
    layer = torch.nn.Linear(6, 5, dtype=torch.float64)
    dtorch.distribute_module(layer, MESH, {})
    with dtorch.record() as r, mode():
        assert linear(x, weight, bias).placements == [S0, S1, S2]
        assert layer(x).placements == [S0, S1, R]
        assert (sequence @ matrix).placements == [S0, S1, S2]
        assert (q @ k).placements == [S0, S1, S2]
        assert linear(*uneven).placements == [S0, R, R]
    assert r.communication == []


def test_backward_moves_nothing_but_the_sum_of_the_weights_gradient() -> None:
    for case in ("linear, no bias", "sequence and a matrix"):
        call, shapes, where = CASES[case]
        x, weight = place(tensors(shapes), where)
        weight = weight.detach().redistribute(placements=[R] * 3).requires_grad_()
        with dtorch.record() as r:
            out = call(x, weight)
            out.backward(torch.ones_like(out))
        assert [(one.kind, one.op) for one in r.communication] == [("all_reduce", "gradient")]


def test_other_calls_are_torchs() -> None:
    x, weight = tensors([(4, 7, 6), (5, 6)])
    placed = dtorch.distribute_tensor(x, MESH, [S0, S1, R])
    torch.testing.assert_close(linear(placed, weight).to_torch(), linear(x, weight))  # a plain weight


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_errors_are_torchs(mode: Any) -> None:
    x, weight = tensors([(4, 7, 6), (5, 6)])
    wrong = {linear: [weight.t().contiguous(), weight.float()], matmul: [x[:3].mT, x, x.mT.float()]}
    placed = dtorch.distribute_tensor(x, MESH, [S0, S1, R])
    for call, others in wrong.items():
        for other in others:
            with mode(), pytest.raises(RuntimeError) as expected:
                call(x, other)
            with mode(), pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
                call(placed, dtorch.distribute_tensor(other, MESH))


def test_a_dispatch_mode_sees_them() -> None:
    _, shapes, where = CASES["linear, by columns"]
    for mode in (torch.no_grad, torch.enable_grad):
        with FlopCounterMode(display=False) as counter, mode():
            linear(*place(tensors(shapes), where))
        assert counter.get_total_flops() == 2 * 4 * 7 * 6 * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    _, shapes, where = CASES["linear, by columns"]
    found = []
    for ts in (
        [t.to(dtype).requires_grad_() for t in tensors(shapes)],
        place([t.to(dtype) for t in tensors(shapes)], where),
    ):
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(*ts)
        out.sum().backward()
        found.append([out.detach(), *(t.grad for t in ts)])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.to_torch(), theirs, rtol=2e-2, atol=2e-2)


def twice(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return linear(linear(x, weight).relu() @ weight, weight)


def ways() -> dict[str, Callable[..., Any]]:
    forward_ad = torch.autograd.forward_ad

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (6,)) * weight.sum()

    def jvp(mode: Any, *of: int) -> Callable[..., Any]:
        def tangents(*given: torch.Tensor) -> Any:
            with forward_ad.dual_level(), mode():
                duals = [
                    forward_ad.make_dual(t.detach(), t.detach() + 1) if i in of else t for i, t in enumerate(given)
                ]
                return [*forward_ad.unpack_dual(twice(*duals)), *forward_ad.unpack_dual(normed(*duals))]

        return tangents

    def checkpointed(x: torch.Tensor, weight: torch.Tensor) -> Any:
        torch.utils.checkpoint.checkpoint(twice, x, weight, use_reentrant=False).square().sum().backward()
        return [x.grad, weight.grad]

    def hooked(x: torch.Tensor, weight: torch.Tensor) -> Any:
        out = linear(x, weight)
        out.register_hook(lambda grad: grad * 2)
        weight.register_hook(lambda grad: grad + 1)
        out.sum().backward()
        return [x.grad, weight.grad]

    def kept(x: torch.Tensor, weight: torch.Tensor) -> Any:
        loss = twice(x, weight).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, weight.grad]

    def written(x: torch.Tensor, weight: torch.Tensor) -> Any:
        h = x * 1
        out = linear(h, weight)
        h.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        return []

    def cast(x: torch.Tensor, weight: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = linear(x.float(), weight.float())
        out.float().square().sum().backward()
        return [out, x.grad, weight.grad]

    def one(at: int) -> Callable[..., Any]:
        def of_one(*given: torch.Tensor) -> Any:
            rest = [t if i == at else t.detach() for i, t in enumerate(given)]
            return torch.autograd.grad(twice(*rest).square().sum(), given[at])

        return of_one

    return {
        "tangent of x": jvp(torch.enable_grad, 0), "tangent of the weight": jvp(torch.enable_grad, 1),
        "tangents, no_grad": jvp(torch.no_grad, 0, 1),
        "checkpointed": checkpointed, "hooked": hooked, "kept": kept, "written": written, "cast": cast,
        "of x": one(0), "of the weight": one(1), "grad": lambda *t: torch.func.grad(lambda *t: twice(*t).sum(), (0, 1))(*t),
        "jacobian": lambda *t: torch.func.jacrev(twice)(*t), "forward jacobian": lambda *t: torch.func.jacfwd(twice)(*t),
        "vmap": lambda x, weight: torch.func.vmap(twice, (0, None))(x, weight),
        "traced": lambda *t: torch.jit.trace(twice, t, check_trace=False)(*t),
    }  # fmt: skip


@pytest.mark.parametrize("where", [[S0, R, R], [S0, S1, S2], [R, R, S1]], ids=str)
@pytest.mark.parametrize("way", ways())
def test_ways_of_autograd(way: str, where: list[Any]) -> None:
    plain = [t.requires_grad_() for t in tensors([(4, 3, 6), (6, 6)])]
    placed = place([t.detach() for t in plain], [where, [R] * 3])
    found, expected = [ways()[way](*ts) for ts in (placed, plain)]
    found, expected = [one if isinstance(one, (list, tuple)) else [one] for one in (found, expected)]
    for ours, theirs in zip(found, expected, strict=True):
        close = {"rtol": 1e-2, "atol": 0.1} if way == "cast" else {}
        torch.testing.assert_close(ours.detach().to_torch(), theirs.detach(), **close)


def test_a_step_of_training_is_few_ops() -> None:
    x, weight, bias = place(tensors([(4, 8, 6), (5, 6), (5,)]), [[S0, R, R], [R] * 3, [R] * 3])
    q, k = place(tensors([(2, 4, 8, 6), (2, 4, 8, 6)]), [[S0, R, R]] * 2)
    for call, given, expected in (
        (linear, (x, weight, bias), {"linear", "matmul", "tensordot", "sum"}),
        (linear, (x[0], weight, bias), {"linear", "mm", "tensordot", "sum"}),
        (matmul, (q, k.mT), {"matmul", "transpose"}),
    ):
        given = [t.detach().requires_grad_() for t in given]
        with dtorch.record() as r:
            out = call(*given)
            torch.autograd.grad(out, given, out.detach())
        assert {one.name.split(".")[1] for one in r.ops if one.name.startswith("aten")} - {"detach"} == expected
        assert len([one for one in r.ops if one.name.split(".")[1:2] == ["matmul"]]) <= 3
