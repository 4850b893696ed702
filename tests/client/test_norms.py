"""``rms_norm`` gives plain torch's bits, as one op with grad off and as torch composes it elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard

MESH = DeviceMesh("cpu", [0, 1])
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.linspace(-1, 2, 8)


def placed(x: torch.Tensor, placement: Any) -> torch.Tensor:
    if not placement.is_partial():
        return dtorch.distribute_tensor(x, MESH, [placement])
    split = dtorch.distribute_tensor(torch.stack([x / 2, x / 2]), MESH, [Shard(0)])
    return split.sum(0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2), Partial()], ids=str)
@pytest.mark.parametrize("weighted", [True, False])
def test_the_values(engine: str, mode: Any, placement: Any, weighted: bool) -> None:
    with mode():
        weight = WEIGHT.clone() if weighted else None
        theirs = placed(WEIGHT, Replicate()) if weighted else None
        expected = torch.nn.functional.rms_norm(X, (8,), weight, 1e-5)
        found = torch.nn.functional.rms_norm(placed(X, placement), (8,), theirs, 1e-5)
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found.to_torch(), expected, rtol=0, atol=0 if placement != Shard(2) else 1e-6)


def test_one_op_with_grad_off(engine: str) -> None:
    module = torch.nn.RMSNorm(8)
    x = placed(X, Shard(1))
    ours = dtorch.distribute_module(module, MESH, {})
    with torch.no_grad(), dtorch.record() as r:
        ours(x)
    assert [op.name for op in r.ops] == ["aten.rms_norm.default"]
    assert r.communication == []
    with dtorch.record() as r:
        ours(x)
    assert len(r.ops) > 1


def test_gradients_are_torchs(engine: str) -> None:
    weight, x = WEIGHT.clone().requires_grad_(), X.clone().requires_grad_()
    theirs, y = placed(WEIGHT, Replicate()).requires_grad_(), placed(X, Shard(1)).requires_grad_()
    torch.nn.functional.rms_norm(x, (8,), weight).square().sum().backward()
    torch.nn.functional.rms_norm(y, (8,), theirs).square().sum().backward()
    torch.testing.assert_close(y.grad.to_torch(), x.grad)
    torch.testing.assert_close(theirs.grad.to_torch(), weight.grad)


@pytest.mark.parametrize(
    ("x", "weight", "shape"),
    [
        (X.bfloat16(), WEIGHT, (8,)),
        (X.bfloat16(), WEIGHT.bfloat16(), (8,)),
        (X.transpose(0, 1), WEIGHT, (8,)),
        (X, None, (5, 8)),
    ],
)
def test_other_types_and_layouts(engine: str, x: torch.Tensor, weight: torch.Tensor | None, shape: Any) -> None:
    with torch.no_grad():
        expected = torch.nn.functional.rms_norm(x, shape, weight)
        ours = None if weight is None else placed(weight, Replicate())
        found = torch.nn.functional.rms_norm(placed(x, Shard(0)), shape, ours)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
        assert torch.equal(found.to_torch(), expected)


@pytest.mark.parametrize("shape", [(7,), (3, 8), ()])
def test_torchs_own_error(engine: str, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        with pytest.raises(RuntimeError) as theirs:
            torch.nn.functional.rms_norm(X, shape)
        with pytest.raises(RuntimeError) as ours:
            torch.nn.functional.rms_norm(placed(X, Shard(0)), shape)
    assert str(ours.value).split("\n")[0] == str(theirs.value).split("\n")[0]
