"""What would be written, and is a plain tensor where another is one of ours: an error, never a write that is lost."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtorch

from .same import every_engine, every_layout, place, same

pytestmark = every_engine

X = torch.linspace(-1.0, 2.0, 12).view(4, 3)

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "+=": operator.iadd, "-=": operator.isub, "*=": operator.imul, "/=": operator.itruediv, "//=": operator.ifloordiv,
    "%=": operator.imod, "**=": operator.ipow, "add_": lambda p, x: p.add_(x), "lerp_": lambda p, x: p.lerp_(x, 0.5),
    "_foreach_add_": lambda p, x: torch._foreach_add_([p], [x]), "a view": lambda p, x: operator.iadd(p[0], x[0]),
    "batch_norm": lambda p, x: nn.functional.batch_norm(x, p[0], p[1].abs(), training=True),
    "instance_norm": lambda p, x: nn.functional.instance_norm(x[None], p[:, 0], p[:, 1].abs()),
    "batch_norm_update_stats": lambda p, x: torch.batch_norm_update_stats(x, p[0], p[1].abs(), 0.1),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WRITES)
def test_refused(name: str, mode: Any) -> None:
    x = place(X, "first")
    with mode():
        plain = X.clone()
        with pytest.raises(dtorch.errors.DTorchError, match=r"would be written, and is a plain torch.Tensor"):
            WRITES[name](plain, x)
    assert torch.equal(plain, X)


@pytest.mark.parametrize("name", ["&=", "|=", "^=", "<<=", ">>="])
def test_operators_of_ints(name: str) -> None:
    plain = torch.arange(6)
    call = {
        "&=": operator.iand,
        "|=": operator.ior,
        "^=": operator.ixor,
        "<<=": operator.ilshift,
        ">>=": operator.irshift,
    }[name]
    with pytest.raises(dtorch.errors.DTorchError, match=r"would be written, and is a plain torch.Tensor"):
        call(plain, place(torch.ones(6, dtype=torch.int64), "first"))


def test_running_statistics() -> None:
    x = place(X, "first")
    for module in (nn.BatchNorm1d(3), nn.InstanceNorm1d(4, track_running_stats=True)):
        with pytest.raises(
            dtorch.errors.DTorchError, match=r"argument 'running_mean' would be written.*distribute_module"
        ):
            module(x)
        module.eval()(x)  # which writes none


@every_layout
def test_update_of_statistics(layout: str) -> None:
    def program(x: Any, mean: Any, variance: Any) -> Any:
        return [torch.batch_norm_update_stats(x, mean, variance, 0.1), mean, variance]

    same(program, layout, X, torch.zeros(3), torch.ones(3))


@every_layout
@pytest.mark.parametrize("number", [3, -0.5, True])
def test_a_number_is_copied(number: Any, layout: str) -> None:
    same(lambda x: [x.copy_(number), x], layout, X)
    same(lambda x: [x.copy_(torch.tensor(3.0)), x], layout, X)


@pytest.mark.parametrize("name", ["apply_", "map_", "map2_"])
def test_loops_over_elements_are_in_no_graph(name: str) -> None:
    def program(x: Any, y: Any) -> Any:
        given = {
            "apply_": (lambda a: a * 10,),
            "map_": (y, lambda a, b: a + b),
            "map2_": (y, y, lambda a, b, c: a + b * c),
        }
        return getattr(x, name)(*given[name])

    same(program, "first", X, X)
    same(program, "first", X.clone().requires_grad_(), X)
    if name != "apply_":
        same(program, "first", X, X.clone().requires_grad_())


def test_numpy_of_a_leaf_with_grad_off() -> None:
    leaf = place(X, "first").requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(torch.from_numpy(leaf.numpy()), X)
    with pytest.raises(RuntimeError, match=r"Can't call numpy\(\) on Tensor that requires grad"):
        leaf.numpy()
