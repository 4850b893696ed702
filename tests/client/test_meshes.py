"""Ops on tensors of several meshes: lists run mesh by mesh, 0-d tensors come to the others, all else is refused."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, pipeline
from dtorch.compiling import Compiled
from dtorch.errors import ImplicitCommunication, MeshMismatch

pytestmark = pytest.mark.usefixtures("engine")

ONE = DeviceMesh("cpu", [0, 1], ("tp",))
OTHER = DeviceMesh("cpu", [2], ("pp",))
FOREACH = [None, False, True]


class Stages:
    """A model in two halves, each on a mesh and sharded there, and the same model whole."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Linear(5, 2))
        halves = copy.deepcopy(self.plain)
        self.first = dtorch.distribute_module(halves[:2], ONE, {"*": [Shard(0)]})
        self.second = dtorch.distribute_module(halves[2:], OTHER)
        self.parameters = [*self.first.parameters(), *self.second.parameters()]

    def backward(self, x: torch.Tensor) -> None:
        self.plain.zero_grad()
        self.plain(x).square().sum().backward()
        for parameter in self.parameters:
            parameter.grad = None
        hidden = self.first(dtorch.from_torch(x, ONE, [Shard(0)]))
        self.second(pipeline.to_stage(hidden, self.second)).square().sum().backward()

    def both(self, function: Callable[[Any], Any]) -> None:
        """What ``function`` of the parameters gives, and the gradients that it leaves, are as for the plain model."""
        expected, found = function(list(self.plain.parameters())), function(self.parameters)
        if expected is not None:
            torch.testing.assert_close(found.to_torch(), expected)
        for ours, plain in zip(self.parameters, self.plain.parameters(), strict=True):
            assert ours.grad.placements == ours.placements
            torch.testing.assert_close(ours.grad.to_torch(), plain.grad)


X = torch.linspace(-2, 2, 12).reshape(3, 4)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_gradients_of_all_stages_are_clipped_by_one_norm(norm: float, foreach: bool | None) -> None:
    stages = Stages()
    for most in (0.1, 1e6):
        stages.backward(X)
        stages.both(lambda ps, most=most: nn.utils.clip_grad_norm_(ps, most, norm, foreach=foreach))  # type: ignore[misc]
    stages.backward(X)
    stages.both(lambda ps: nn.utils.get_total_norm([p.grad for p in ps], norm, foreach=foreach))
    total = torch.tensor(3.0)
    stages.both(lambda ps: nn.utils.clip_grads_with_norm_(ps, 0.2, total, foreach=foreach))
    ours = dtorch.tensor(2.0, device_mesh=OTHER)
    stages.both(
        lambda ps: nn.utils.clip_grads_with_norm_(
            ps, 0.2, ours if ps is stages.parameters else ours.to_torch(), foreach
        )
    )


@pytest.mark.parametrize("foreach", FOREACH)
def test_gradients_of_all_stages_are_clipped_by_value(foreach: bool | None) -> None:
    stages = Stages()
    stages.backward(X)
    stages.both(lambda ps: nn.utils.clip_grad_value_(ps, 0.05, foreach=foreach))


def test_a_norm_that_is_not_finite_is_an_error() -> None:
    stages = Stages()
    stages.backward(X * float("nan"))
    with pytest.raises(RuntimeError, match="is non-finite"):
        nn.utils.clip_grad_norm_(stages.parameters, 0.1, error_if_nonfinite=True)


def test_pending_gradients_are_clipped_by_the_norm_of_their_sums() -> None:
    plain = [torch.ones(3, 2), torch.full((2,), 4.0)]
    ours = [
        nn.Parameter(dtorch.zeros(3, 2, device_mesh=ONE)),
        nn.Parameter(dtorch.zeros(2, device_mesh=OTHER)),
    ]
    with dtorch.no_sync():
        for parameter, grad in zip(ours, plain, strict=True):
            parameter.grad = dtorch.from_torch(grad, parameter.device_mesh, [Partial()])
        total = nn.utils.clip_grad_norm_(ours, 0.5)
    copies = [nn.Parameter(torch.zeros_like(grad)) for grad in plain]
    for parameter, grad in zip(copies, plain, strict=True):
        parameter.grad = grad.clone()
    torch.testing.assert_close(total.to_torch(), nn.utils.clip_grad_norm_(copies, 0.5))
    for parameter, one in zip(ours, copies, strict=True):
        torch.testing.assert_close(parameter.grad.to_torch(), one.grad)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("foreach", FOREACH)
def test_training_with_clipping(foreach: bool | None, compiled: bool) -> None:
    stages = Stages()
    first, second = stages.first, stages.second

    def train(model: Callable[[Any], Any], parameters: Any, place: Callable[[Any], Any], compile: Any) -> list[Any]:
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            total = nn.utils.clip_grad_norm_(parameters, 0.3, foreach=foreach)
            optimizer.step()
            return loss.detach(), total

        step = compile(step)
        results = [step(place(X * (1 + i))) for i in range(5)]
        assert not isinstance(step, Compiled) or step.program is not None
        return results

    found = train(
        lambda x: second(pipeline.to_stage(first(x), second)),
        stages.parameters,
        lambda x: dtorch.from_torch(x, ONE, [Shard(0)]),
        dtorch.compile if compiled else lambda step: step,
    )
    expected = train(stages.plain, list(stages.plain.parameters()), lambda x: x, lambda step: step)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close([one.to_torch() for one in ours], list(plain))
    stages.both(lambda ps: None)


def scalars() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.tensor(2.0), torch.tensor(3.0), torch.arange(4.0) - 1.5


#: Of a 0-d tensor on one mesh, one on the other, and a vector there; with the mesh of what it gives.
OPS: dict[str, tuple[Callable[[Any, Any, Any], Any], DeviceMesh]] = {
    "0-d + 0-d": (lambda a, b, v: a + b, ONE),
    "0-d - 0-d the other way": (lambda a, b, v: b - a, OTHER),
    "0-d * vector": (lambda a, b, v: a * v, OTHER),
    "vector / 0-d": (lambda a, b, v: v / a, OTHER),
    "in place": (lambda a, b, v: v.mul_(a), OTHER),
    "in place of 0-d": (lambda a, b, v: a.sub_(b), ONE),
    "copy": (lambda a, b, v: a.copy_(b), ONE),
    "stack": (lambda a, b, v: torch.stack([a, b, a]), ONE),
    "where": (lambda a, b, v: torch.where(v > a, v, b), OTHER),
    "clamp": (lambda a, b, v: v.clamp(-a, a), OTHER),
    "a list by 0-d": (lambda a, b, v: torch._foreach_mul([v, v + 1], a)[1], OTHER),
    "lists": (lambda a, b, v: torch._foreach_add([v, b], [a, a])[0], OTHER),
    "a list in place, by one of its own": (lambda a, b, v: (torch._foreach_mul_([v, a, w := v + 1], a), w)[1], OTHER),
    "lists in place, of each other": (lambda a, b, v: (torch._foreach_add_([a, b], [b, a]), b)[1], OTHER),
    "a number and a list": (lambda a, b, v: torch._foreach_pow(2.0, [a, v])[1], OTHER),
    "a view": (lambda a, b, v: v.mul_(torch.stack([a, a])[1]), OTHER),
    "the same kept copy": (lambda a, b, v: v * a + v * a.mul_(2), OTHER),
    "ints": (lambda a, b, v: v * a.long(), OTHER),
    "doubles": (lambda a, b, v: v * a.double(), OTHER),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("vector", "scalar"), itertools.product([Replicate(), Shard(0)], [Replicate(), Partial()]))
def test_a_0d_tensor_comes_to_the_others(name: str, vector: Any, scalar: Any) -> None:
    function, mesh = OPS[name]
    a, b, v = scalars()
    expected = function(a.clone(), b.clone(), v.clone())
    found = function(
        dtorch.from_torch(a, ONE, [scalar]),
        dtorch.from_torch(b, OTHER),
        dtorch.from_torch(v, OTHER, [vector]),
    )
    assert found.device_mesh == mesh
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.to_torch(), expected)


def test_gradients_of_what_a_0d_tensor_of_another_mesh_is_multiplied_with() -> None:
    a, _, v = scalars()
    v.requires_grad_()
    (v * a).square().sum().backward()
    ours = dtorch.from_torch(v.detach(), OTHER).requires_grad_()
    (ours * dtorch.from_torch(a, ONE)).square().sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(ours.grad.to_torch(), v.grad)


def test_what_was_brought_is_let_go() -> None:
    """Without a collection: no error that was handled holds on to the frames that it went through."""
    gc.collect()
    gc.disable()
    try:
        v = dtorch.from_torch(scalars()[2], OTHER)
        value = weakref.ref(v._value)
        torch._foreach_mul([v, v], dtorch.from_torch(torch.tensor(2.0), ONE))
        v * dtorch.from_torch(torch.tensor(2.0), ONE)
        del v
        assert value() is None
    finally:
        gc.enable()


REFUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "vectors": lambda a, b, v: v + torch.ones_like(v).redistribute(ONE),
    "a vector in place of another mesh": lambda a, b, v: v.redistribute(ONE).add_(v),
    "it requires grad": lambda a, b, v: v * a.requires_grad_(),
    "it is computed with grad": lambda a, b, v: v * (a.requires_grad_() * 2),
    "a list whose items are vectors": lambda a, b, v: torch._foreach_add([v, b], [v.redistribute(ONE), b]),
    "written, and of no dims": lambda a, b, v: a.add_(v),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    a, b, v = scalars()
    given = dtorch.from_torch(a, ONE), dtorch.from_torch(b, OTHER), dtorch.from_torch(v, OTHER)
    with pytest.raises(MeshMismatch, match=rf"(?s)different meshes.*redistribute\(device_mesh=.*{__file__}:"):
        REFUSED[name](*given)
    torch.testing.assert_close([one.detach().to_torch() for one in given], [a, b, v])


def test_it_is_told() -> None:
    stages = Stages()
    stages.backward(X)
    with dtorch.record() as r:
        nn.utils.clip_grad_norm_(stages.parameters, 0.1)
    moved = [one for one in r.communication if set(one.op.split(".")) & {"stack", "_foreach_mul_"}]
    assert [(one.shape, one.asked_for) for one in moved] == [((), False)] * 5
    names = [one.name for one in r.ops]
    assert names.count("aten._foreach_norm.Scalar") == 2  # once a mesh
    assert names.count("aten._foreach_mul_.Tensor") == 2 + 1  # and the coefficient's move
    for mode, kind in (("error", ImplicitCommunication), ("warn", UserWarning)):
        a, _, v = scalars()
        one, other = dtorch.from_torch(a, ONE), dtorch.from_torch(v, OTHER)
        words = rf"(?s)aten.mul.Tensor needs.*{__file__}:.*shape \(\), \[Replicate\(\)\] on DeviceMesh\('cpu', \[0, 1\].*device_mesh="
        with dtorch.set_implicit_communication(mode):
            expect = pytest.raises(kind, match=words) if mode == "error" else pytest.warns(kind, match=words)
            with expect:
                other * one
            with expect if mode == "error" else pytest.warns(kind, match=words):
                other * one  # a kept copy changes nothing
        torch.testing.assert_close((other * one).to_torch(), v * a)


def test_a_compiled_function_tells_it_too() -> None:
    a, _, v = scalars()
    one, other = dtorch.from_torch(a, ONE), dtorch.from_torch(v, OTHER)
    product = dtorch.compile(lambda one, other: other * one)
    for _ in range(3):
        torch.testing.assert_close(product(one, other).to_torch(), v * a)
    with dtorch.set_implicit_communication("error"), pytest.raises(ImplicitCommunication, match=r"aten.mul.Tensor"):
        product(one, other)
    torch.testing.assert_close(product(one.mul_(2), other).to_torch(), v * a * 2)


def test_the_loss_of_two_stages() -> None:
    """Brought over by name it has a gradient."""
    x = dtorch.from_torch(torch.ones(3), ONE).requires_grad_()
    y = dtorch.from_torch(torch.ones(2), OTHER).requires_grad_()
    (x.sum() + F.mse_loss(y, y.detach() + 1).redistribute(ONE)).backward()
    torch.testing.assert_close(x.grad.to_torch(), torch.ones(3))
    torch.testing.assert_close(y.grad.to_torch(), torch.full((2,), -1.0))
