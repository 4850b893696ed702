"""Autograd on dtorch tensors: leaves, accumulation, hooks, double backward, custom functions, as on one device."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F

from .same import each, every_engine, every_layout, same

pytestmark = [every_engine, every_layout]

X = torch.linspace(-2, 2, 24).reshape(4, 6).requires_grad_()
W = torch.linspace(1, -1, 24).reshape(4, 6).cos().requires_grad_()
DATA = torch.linspace(0, 3, 24).reshape(4, 6).sin()


def backward_twice_refused(x: Any, w: Any) -> Any:
    loss = (x * w).sum()
    loss.backward()
    loss.backward()


def backward_twice_retained(x: Any, w: Any) -> Any:
    loss = (x.exp() * w).sum()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    return first, x.grad, w.grad


def backward_of_a_matrix_refused(x: Any, w: Any) -> Any:
    (x * w).backward()


def backward_with_a_gradient(x: Any, w: Any) -> Any:
    (x * w).backward(torch.ones_like(x))
    (x * 2).backward(gradient=w.detach())
    return x.grad, w.grad


def backward_with_inputs(x: Any, w: Any) -> Any:
    (x * w).sum().backward(inputs=[x])
    return x.grad, w.grad


def gradients_of_some_inputs(x: Any, w: Any) -> Any:
    """A backward of several gradients makes those that are asked for."""
    image, weights, bias = x.detach().view(2, 3, 4), w[:3, 0].detach(), w[:3, 1].detach()
    kernel, points = w.view(2, 3, 4)[:, :, :2].detach(), x.view(1, 4, 3, 2).tanh().detach()
    calls = (
        (F.batch_norm, (image, None, None, weights, bias, True)),
        (F.batch_norm, (image, bias.detach(), weights.detach().square(), weights, bias, False)),
        (F.instance_norm, (image, None, None, weights, bias)),
        (F.group_norm, (image, 3, weights, bias)),
        (F.layer_norm, (image.transpose(1, 2), (3,), weights, bias)),
        (F.conv1d, (image, kernel)),
        (F.grid_sample, (image.view(1, 2, 3, 4), points, "bilinear", "zeros", True)),
    )
    found = []
    for function, given in calls:
        inputs = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor)]
        for wanted in [c for n in range(1, len(inputs)) for c in combinations(inputs, n)]:
            leaves = [v.detach().requires_grad_(i in wanted) if i in inputs else v for i, v in enumerate(given)]
            if function is F.batch_norm and not given[-1]:
                leaves[1:3] = given[1:3]
                if not set(wanted) - {1, 2}:
                    continue
            function(*leaves).sin().sum().backward()
            found += [v.grad for v in leaves if isinstance(v, torch.Tensor)]
    return [f for f in found if f is not None], len(found)


def backward_without_grad(x: Any, w: Any) -> Any:
    x.detach().sum().backward()


def grads_of_non_leaves(x: Any, w: Any) -> Any:
    y = x * 2
    z = (y * w).exp()
    return torch.autograd.grad(z.sum(), [y, z, x, w], retain_graph=True), torch.autograd.grad(z, y, torch.ones_like(z))


def grad_unused(x: Any, w: Any) -> Any:
    return torch.autograd.grad(x.sum(), [x, w], allow_unused=True)


def grad_unused_refused(x: Any, w: Any) -> Any:
    return torch.autograd.grad(x.sum(), [x, w])


def grad_materialized(x: Any, w: Any) -> Any:
    return torch.autograd.grad(x.sum(), [x, w], materialize_grads=True)


def batched_grad(x: Any, w: Any) -> Any:
    y = (x * w).sum(0)
    return torch.autograd.grad(y, x, torch.eye(6), is_grads_batched=True)


def double_backward(x: Any, w: Any) -> Any:
    (g,) = torch.autograd.grad((x**3 * w).sum(), x, create_graph=True)
    (g * g).sum().backward()
    return g, x.grad, w.grad


def third_derivative(x: Any, w: Any) -> Any:
    y = (x**4).sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.sum()
    return g


def gradient_penalty(x: Any, w: Any) -> Any:
    out = torch.tanh(x @ w.t()).sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    ((g.norm(2, dim=1) - 1) ** 2).mean().backward()
    return x.grad, w.grad


def retained_gradients(x: Any, w: Any) -> Any:
    y = x * w
    y.retain_grad()
    y.exp().sum().backward()
    return y.grad, x.grad


def grad_of_non_leaf_is_none(x: Any, w: Any) -> Any:
    y = x * w
    return y.retains_grad, y.is_leaf, x.is_leaf, y.output_nr, type(y.grad_fn).__name__


def grad_assigned(x: Any, w: Any) -> Any:
    x.grad = torch.ones_like(x)
    (x * w).sum().backward()
    w.grad = None
    x.grad.zero_()
    kept = x.grad
    (x * w).sum().backward()
    return x.grad, w.grad, kept is x.grad, x.grad.requires_grad


def grad_assigned_wrong_shape(x: Any, w: Any) -> Any:
    x.grad = torch.ones(3)


def grad_in_place(x: Any, w: Any) -> Any:
    (x * w).sum().backward()
    x.grad.mul_(2)
    x.grad[0] = 0
    x.grad.data.add_(1)
    del w.grad
    return x.grad, w.grad


def grad_kept_while_accumulating(x: Any, w: Any) -> Any:
    (x * w).sum().backward()
    held = x.grad
    (x * w).sum().backward()
    return held, x.grad is held


def detach_and_detach_(x: Any, w: Any) -> Any:
    y = x * w
    z = y.detach()
    z.add_(1)
    y.detach_()
    return y, z, y.requires_grad, y.is_leaf


def requires_grad_on_and_off(x: Any, w: Any) -> Any:
    w.requires_grad_(False)
    y = (x * w).sum()
    y.backward()
    x.requires_grad = False
    z = (x * w).requires_grad
    x.requires_grad = True
    (x * 3).sum().backward()
    return z, x.grad, w.grad, w.requires_grad


def requires_grad_of_a_result_refused(x: Any, w: Any) -> Any:
    (x * w).requires_grad_(False)


def modes(x: Any, w: Any) -> Any:
    with torch.no_grad():
        a = x * w
        with torch.enable_grad():
            b = x * w
    with torch.set_grad_enabled(False):
        c = x + w
    with torch.inference_mode():
        d = x + w
    return a, b, c, d.requires_grad, d.is_inference()


def inference_tensors_refused(x: Any, w: Any) -> Any:
    with torch.inference_mode():
        d = x.detach() * 2
    return x * d


def hooks(x: Any, w: Any) -> Any:
    seen = []
    x.register_hook(lambda g: seen.append(g.clone()))
    x.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: seen.append(g.clone()))
    y = x * w
    handle = y.register_hook(lambda g: g * 100)
    handle.remove()
    y.register_hook(lambda g: g + 1)
    x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    y.sum().backward()
    return seen, x.grad, w.grad


def hook_that_writes(x: Any, w: Any) -> Any:
    x.register_hook(lambda g: g.clamp(max=0.5))
    x.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3))
    (x * w).sum().backward()
    return x.grad


def optimizer_in_the_hook(x: Any, w: Any) -> Any:
    def step(p: Any) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    x.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        (x * x * w).sum().backward()
    return x, x.grad


def hook_removed_by_clearing(x: Any, w: Any) -> Any:
    handle = x.register_hook(lambda g: g * 2)
    (x * w).sum().backward()
    handle.remove()
    (x * w).sum().backward()
    return x.grad, len(x._backward_hooks or {}) <= 1


def node_hooks(x: Any, w: Any) -> Any:
    seen = []
    y = (x * w).exp()
    y.grad_fn.register_hook(lambda gi, go: seen.append(go[0]))
    y.grad_fn.register_prehook(lambda go: (go[0] * 2,))
    y.sum().backward()
    return seen, x.grad


def multi_grad_hook(x: Any, w: Any) -> Any:
    seen = []
    torch.autograd.graph.register_multi_grad_hook([x, w], lambda gs: seen.extend(gs))
    (x * w).sum().backward()
    return seen


def saved_tensor_hooks(x: Any, w: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        y = (x.exp() * w).sum()
    y.backward()
    return x.grad, w.grad


def save_on_cpu(x: Any, w: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() * w).sum()
    y.backward()
    return x.grad, w.grad


def custom_function(x: Any, w: Any) -> Any:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any, scale: Any) -> Any:
            ctx.save_for_backward(a)
            ctx.scale = scale
            return a * a * scale

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            (a,) = ctx.saved_tensors
            return grad * 2 * a * ctx.scale, None

    y = Square.apply(x, 3.0)
    (y * w).sum().backward()
    return y, x.grad, w.grad


def custom_function_in_place(x: Any, w: Any) -> Any:
    class AddOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Any) -> Any:
            ctx.mark_dirty(a)
            return a.add_(1)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    y = AddOne.apply(x * w)
    (y * y).sum().backward()
    return y, x.grad


def straight_through(x: Any, w: Any) -> Any:
    y = x + (x.round() - x).detach()
    (y * w).sum().backward()
    return y, x.grad


def anomaly(x: Any, w: Any) -> Any:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        (x * w).sum().backward()
    return x.grad


def frozen_part(x: Any, w: Any) -> Any:
    y = x.clone()
    y.data[0] = 0
    (y * w).sum().backward()
    return y, x.grad, w.grad


def data_of_a_leaf(x: Any, w: Any) -> Any:
    x.data = x.data * 2
    x.data.clamp_(max=1.0)
    x.data[0, 0] = 9
    (x * w).sum().backward()
    x.data -= 0.1 * x.grad.data
    return x, x.grad, x.data.requires_grad


def expanded_and_broadcast(x: Any, w: Any) -> Any:
    y = x[:, :1].expand(4, 6) * w + x[0] + x.sum()
    y.sum().backward()
    return y, x.grad, w.grad


def inplace_activation(x: Any, w: Any) -> Any:
    y = F.relu(x * w, inplace=True)
    z = F.leaky_relu_(y + 1)
    z += w
    z.sum().backward()
    return z, x.grad, w.grad


def out_with_grad_refused(x: Any, w: Any) -> Any:
    torch.add(x, w, out=torch.empty_like(x))


def where_and_nan(x: Any, w: Any) -> Any:
    torch.where(x > 0, x.sqrt(), w).sum().backward()
    return x.grad, w.grad


def cumulative(x: Any, w: Any) -> Any:
    total = torch.zeros_like(x[0])
    for row, other in zip(x, w, strict=True):
        total = total + row * other
    total.sum().backward()
    return total, x.grad, w.grad


def running_buffer(x: Any, w: Any) -> Any:
    out = torch.empty_like(x).detach()
    for i in range(4):
        out[i] = x[i] * w[i]
    out.sum().backward()
    return out, x.grad, w.grad


def jacobian(x: Any, w: Any) -> Any:
    return torch.autograd.functional.jacobian(lambda a: (a * w).sum(1), x)


def hessian(x: Any, w: Any) -> Any:
    return torch.autograd.functional.hessian(lambda a: (a**3).sum(), x[0].detach())


def forward_mode(x: Any, w: Any) -> Any:
    import torch.autograd.forward_ad as fwAD

    with fwAD.dual_level():
        dual = fwAD.make_dual(x.detach(), w.detach())
        y = dual.sin() * dual
        return fwAD.unpack_dual(y).tangent


def gradcheck(x: Any, w: Any) -> Any:
    a = x.detach().double()[:2, :2].requires_grad_()
    return torch.autograd.gradcheck(lambda t: t.sin() * t, (a,))


def graph_is_none(x: Any, w: Any) -> Any:
    (x * w).sum().backward()
    return x.grad.grad_fn is None, x.grad.is_leaf, x.grad_fn is None, (x * 1)._version


def version_counter(x: Any, w: Any) -> Any:
    y = x.detach().clone()
    view = y[0]
    y.add_(1)
    view.mul_(2)
    return y._version, view._version, y._is_view(), view._is_view(), view._base is y


@each(*[p for p in list(globals().values()) if getattr(p, "__module__", None) == __name__ and callable(p)])
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, X, W)
