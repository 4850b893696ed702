"""torch.func on dtorch tensors: grad, vmap over any dim, Jacobians, Hessians, functional_call, per-sample gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import dtorch
from dtorch import Replicate, Shard

from .same import each, every_engine, every_layout, place, same

pytestmark = every_engine

X = torch.linspace(-2, 2, 24).reshape(4, 6)
W = torch.linspace(1, -1, 24).reshape(4, 6).cos()


def gradient(x: Any, w: Any) -> Any:
    return grad(lambda a, b: (a.sin() * b).sum(), argnums=(0, 1))(x, w)


def gradient_with_aux(x: Any, w: Any) -> Any:
    return grad(lambda a: ((a * w).sum(), a.mean(0)), has_aux=True)(x), grad_and_value(lambda a: (a * w).sum())(x)


def gradient_of_gradient(x: Any, w: Any) -> Any:
    return grad(lambda a: grad(lambda b: (b**3 * w).sum())(a).pow(2).sum())(x)


def rows(x: Any, w: Any) -> Any:
    return vmap(lambda a: a.sum() * 2)(x), vmap(torch.dot)(x, w), vmap(lambda a, b: a * b + 1)(x, w)


def columns(x: Any, w: Any) -> Any:
    return vmap(lambda a: a / a.norm(), in_dims=1)(x), vmap(lambda a: a.cumsum(0), in_dims=1, out_dims=1)(x)


def mixed_dims(x: Any, w: Any) -> Any:
    return vmap(lambda a, b: a @ b, in_dims=(0, None))(x, w.t()), vmap(torch.mul, in_dims=(1, 0), out_dims=-1)(x, w.t())


def nested(x: Any, w: Any) -> Any:
    pairs = vmap(vmap(torch.dot, in_dims=(None, 0)), in_dims=(0, None))(x, w)
    outer = vmap(lambda a: vmap(lambda b: b * a.sum())(w))(x)
    return pairs, outer


def outputs_of_many_kinds(x: Any, w: Any) -> Any:
    return vmap(lambda a: {"max": a.max(), "sorted": a.sort().values, "first": (a[0], a[1:3])})(x)


def chunked(x: Any, w: Any) -> Any:
    return vmap(lambda a: a.softmax(0), chunk_size=3)(x)


def batched_matmul(x: Any, w: Any) -> Any:
    return vmap(lambda a, b: torch.outer(a, b) @ b)(x, w), vmap(lambda a: w @ a)(x)


def with_masks_and_indices(x: Any, w: Any) -> Any:
    return (
        vmap(lambda a: torch.where(a > 0, a, a * 0.1))(x),
        vmap(lambda a, i: a[i])(x, torch.tensor([0, 1, 2, 3])),
        vmap(lambda a: a.masked_fill(a > 0, 1.0))(x),
        vmap(lambda a: a.index_select(0, torch.tensor([1, 2])))(x),
    )


def writes_inside(x: Any, w: Any) -> Any:
    def f(a: Any) -> Any:
        b = a.clone()
        b[0] = 5
        b.mul_(2)
        return b

    return vmap(f)(x), grad(lambda a: f(a).sum())(x[0])


def jacobians(x: Any, w: Any) -> Any:
    def f(a: Any) -> Any:
        return (a * w).sum(1).sin()

    return jacrev(f)(x), jacfwd(f)(x), jacrev(f, chunk_size=2)(x)


def hessians(x: Any, w: Any) -> Any:
    def f(a: Any) -> Any:
        return (a**3 * w[0]).sum()

    return hessian(f)(x[0]), jacrev(jacrev(f))(x[0]), vmap(hessian(f))(x)


def products(x: Any, w: Any) -> Any:
    out, pull = vjp(lambda a: a.sin(), x)
    return out, pull(w), jvp(lambda a: a.sin() * a, (x,), (w,))


def functionalized(x: Any, w: Any) -> Any:
    def f(a: Any) -> Any:
        b = a.clone()
        b.add_(1)
        return b * 2

    return functionalize(f)(x)


def randomness_refused(x: Any, w: Any) -> Any:
    return vmap(lambda a: a + torch.rand_like(a))(x)


PROGRAMS = [p for p in list(globals().values()) if getattr(p, "__module__", None) == __name__ and callable(p)]


@each(*PROGRAMS)
@every_layout
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, X, W)


def called_with_other_parameters(model: Any, x: Any) -> Any:
    parameters = {k: v.detach() * 2 for k, v in model.named_parameters()}
    return functional_call(model, parameters, (x,)), functional_call(model, {"0.bias": x[0, :5]}, x)


def gradients_of_parameters(model: Any, x: Any) -> Any:
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    return grad(lambda p: functional_call(model, p, (x,)).pow(2).mean())(parameters)


def per_sample_gradients(model: Any, x: Any) -> Any:
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p: Any, sample: Any) -> Any:
        return functional_call(model, p, (sample[None],)).pow(2).mean()

    return vmap(grad(loss), in_dims=(None, 0))(parameters, x)


def ensembles(model: Any, x: Any) -> Any:
    parameters, buffers = stack_module_state([model, model])
    return vmap(lambda p, b: functional_call(model, (p, b), (x,)))(parameters, buffers)


def neural_tangent_kernel(model: Any, x: Any) -> Any:
    parameters = {k: v.detach() for k, v in model.named_parameters()}
    jacobian = jacrev(lambda p: functional_call(model, p, (x,)).sum(1))(parameters)
    return sum(j.flatten(1) @ j.flatten(1).t() for j in jacobian.values())


@each(called_with_other_parameters, gradients_of_parameters, per_sample_gradients, ensembles, neural_tangent_kernel)
@every_layout
def test_a_model(program: Any, layout: str) -> None:
    torch.manual_seed(0)
    same(program, layout, nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), X)


@every_layout
def test_redistribute_inside(layout: str) -> None:
    x, mesh = place(X, layout), place(X, layout).device_mesh
    whole = [Replicate()] * mesh.ndim
    found = grad(lambda a: (dtorch.redistribute(a, mesh, whole) ** 2).sum())(x)
    torch.testing.assert_close(found.to_torch(), 2 * X)
    found = vmap(lambda a: dtorch.redistribute(a, mesh, whole) * 2)(x)
    torch.testing.assert_close(found.to_torch(), 2 * X)
    found = vmap(grad(lambda a: (dtorch.redistribute(a, mesh, [Shard(0), *whole[1:]]) ** 2).sum()))(x)
    torch.testing.assert_close(found.to_torch(), 2 * X)
