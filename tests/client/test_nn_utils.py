"""torch.nn.utils, parametrizations, averaged models, schedulers, checkpoints, autocast: around a module on the mesh as around any."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dtorch
from dtorch import Replicate

from .same import each, every_engine, every_layout, place, place_module, same

pytestmark = every_engine

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def backward(model: Any, x: Any) -> Any:
    model(x).pow(2).sum().backward()
    return [p.grad for p in model.parameters()]


def clip_norm(model: Any, x: Any) -> Any:
    backward(model, x)
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return total, [p.grad for p in model.parameters()]


def clip_norm_kinds(model: Any, x: Any) -> Any:
    backward(model, x)
    by = [
        nn.utils.clip_grad_norm_(model.parameters(), 5.0, norm_type=n, foreach=f)
        for n in (1, 2, float("inf"))
        for f in (True, False)
    ]
    total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, total)
    return by, total, [p.grad for p in model.parameters()]


def clip_value(model: Any, x: Any) -> Any:
    backward(model, x)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return [p.grad for p in model.parameters()]


def clip_nan(model: Any, x: Any) -> Any:
    backward(model, x)
    model[0].weight.grad[0, 0] = float("nan")
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def vectors(model: Any, x: Any) -> Any:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 2, model.parameters())
    return vector, model(x)


def weight_norm(model: Any, x: Any) -> Any:
    parametrizations.weight_norm(model[0])
    out = model(x)
    return out, backward(model, x), list(model.state_dict())


def old_weight_norm(model: Any, x: Any) -> Any:
    nn.utils.weight_norm(model[0])
    out = backward(model, x)
    nn.utils.remove_weight_norm(model[0])
    return out, model(x)


def orthogonal(model: Any, x: Any) -> Any:
    parametrizations.orthogonal(model[0])
    return model(x), backward(model, x), model[0].weight @ model[0].weight.t()


def spectral_norm(model: Any, x: Any) -> Any:
    model.eval()
    model[0].weight_ = None
    parametrizations.spectral_norm(model[0], n_power_iterations=50)
    model[0].parametrizations.weight[0]._u.copy_(x.new_ones(6) / 6**0.5)
    model[0].parametrizations.weight[0]._v.copy_(x.new_ones(6) / 6**0.5)
    return model(x).shape, backward(model, x)[0].shape


def own_parametrization(model: Any, x: Any) -> Any:
    class Symmetric(nn.Module):
        def forward(self, w: Any) -> Any:
            return w.triu() + w.triu(1).transpose(-1, -2)

        def right_inverse(self, w: Any) -> Any:
            return w.triu()

    parametrize.register_parametrization(model[0], "weight", Symmetric())
    out = model(x), backward(model, x)
    with parametrize.cached():
        cached = model[0].weight is model[0].weight
    model[0].weight = x.t() @ x
    parametrize.remove_parametrizations(model[0], "weight")
    return out, cached, model[0].weight, parametrize.is_parametrized(model)


def pruned(model: Any, x: Any) -> Any:
    prune.l1_unstructured(model[0], "weight", amount=10)
    prune.ln_structured(model[2], "weight", amount=2, n=2, dim=1)
    out = model(x), model[0].weight_mask
    prune.remove(model[0], "weight")
    return out, model[0].weight, backward(model, x)


def fused(model: Any, x: Any) -> Any:
    conv, norm = nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2)
    conv.weight = nn.Parameter(x[:2, None, :3].clone())
    conv.bias = nn.Parameter(x[0, :2].clone())
    norm.weight, norm.bias = nn.Parameter(x[1, :2].clone()), nn.Parameter(x[2, :2].clone())
    norm.running_mean, norm.running_var = x[0, :2].clone(), x[1, :2].abs().clone()
    conv.eval(), norm.eval()
    return nn.utils.fusion.fuse_conv_bn_eval(conv, norm)(x[:, None])


def packed(model: Any, x: Any) -> Any:
    rows = nn.utils.rnn.pad_sequence([x[0, :3], x[1, :5], x[2]], batch_first=True, padding_value=-1.0)
    x.requires_grad_()
    one = nn.utils.rnn.pack_padded_sequence(x[:, :, None], torch.tensor([6, 4, 2, 1]), batch_first=True)
    back, lengths = nn.utils.rnn.pad_packed_sequence(one, batch_first=True)
    (back * back).sum().backward()
    loose = nn.utils.rnn.pack_padded_sequence(x.t()[..., None], [1, 3, 6, 2], enforce_sorted=False)
    return (
        x.grad,
        loose.data,
        loose.sorted_indices,
        rows,
        one.data,
        one.batch_sizes,
        back,
        lengths,
        nn.utils.rnn.unpad_sequence(rows, torch.tensor([3, 5, 6]), True),
    )


def packed_lstm(model: Any, x: Any) -> Any:
    torch.manual_seed(0)
    lstm = nn.LSTM(1, 3, num_layers=2, bidirectional=True)
    for name, p in list(lstm.named_parameters()):
        setattr(lstm, name, nn.Parameter(x[0].sum() * 0 + p.detach()))
    out, (h, c) = lstm(nn.utils.rnn.pack_padded_sequence(x.t()[..., None], [1, 3, 6, 2], enforce_sorted=False))
    out.data.sum().backward()
    return nn.utils.rnn.pad_packed_sequence(out), h, c, lstm.weight_hh_l0.grad


def averaged(model: Any, x: Any) -> Any:
    mean = swa_utils.AveragedModel(model)
    ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        mean.update_parameters(model)
        ema.update_parameters(model)
    return mean(x), ema(x), mean.n_averaged, list(ema.state_dict())


def trained_with_schedulers(model: Any, x: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], milestones=[2])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    plateau.step(losses[-1])
    return losses, optimizer.param_groups[0]["lr"], list(model.parameters())


def optimizer_state(model: Any, x: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    backward(model, x)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    other = torch.optim.Adam(model.parameters(), lr=0.5)
    other.load_state_dict(state)
    backward(model, x)
    other.step()
    return list(model.parameters()), state["state"][0], other.param_groups[0]["lr"]


def tensor_learning_rate(model: Any, x: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    backward(model, x)
    optimizer.step()
    optimizer.param_groups[0]["lr"].mul_(0.5)
    optimizer.step()
    return list(model.parameters())


def accumulated(model: Any, x: Any) -> Any:
    for part in x.split(2):
        (model(part).pow(2).sum() / 2).backward()
    return [p.grad for p in model.parameters()]


def closure(model: Any, x: Any) -> Any:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    return optimizer.step(step), list(model.parameters())


def checkpointed(model: Any, x: Any) -> Any:
    found = []
    for reentrant in (True, False):
        model.zero_grad()
        x.grad = None
        x.requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).pow(2).sum().backward()
        found.append([x.grad, *[p.grad for p in model.parameters()]])
    model.zero_grad()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return found, [p.grad for p in model.parameters()]


def nested_checkpoints(model: Any, x: Any) -> Any:
    def inner(a: Any) -> Any:
        return checkpoint(model, a.sin(), use_reentrant=False) * 2

    checkpoint(inner, x, use_reentrant=False).sum().backward()
    return [p.grad for p in model.parameters()]


def autocast(model: Any, x: Any) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        out = model(x)
        loss = F.mse_loss(out, x[:, :3])
        kept = (x @ x.t()).dtype, x.softmax(0).dtype, torch.is_autocast_enabled(x.device.type)
        with torch.autocast(x.device.type, enabled=False):
            kept += (model(x).dtype,)
    loss.backward()
    return out.dtype, loss.dtype, kept, model[0].weight.grad.dtype


def scaled(model: Any, x: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(x).pow(2).mean()).backward()
    scaler.unscale_(optimizer)
    grads = [p.grad.clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    return grads, list(model.parameters()), scaler.get_scale()


def containers(model: Any, x: Any) -> Any:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list = nn.ParameterList([x[0].clone(), x[1].clone()])
            self.dict = nn.ParameterDict({"a": nn.Parameter(x[2].clone())})
            self.buffer = nn.Buffer(x[3].clone())
            self.register_buffer("hidden", x[0].clone(), persistent=False)

        def forward(self, y: Any) -> Any:
            return y * self.list[0] + self.list[1] * self.dict["a"] + self.buffer + self.hidden

    mixed = Mixed()
    out = mixed(x)
    out.sum().backward()
    return (
        out,
        [p.grad for p in mixed.parameters()],
        list(mixed.state_dict()),
        dict(mixed.named_buffers()),
        copy.deepcopy(mixed)(x),
    )


def lazy(model: Any, x: Any) -> Any:
    layer = nn.LazyLinear(3)
    layer(x)
    return tuple(layer.weight.shape), layer.in_features


@each(
    *[
        p
        for p in list(globals().values())
        if getattr(p, "__module__", None) == __name__
        and callable(p)
        and p.__code__.co_varnames[:1] == ("model",)
        and p is not backward
    ]
)
@every_layout
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, net(), X)


@every_layout
def test_gradients_of_leaves_have_the_placements_of_the_leaves(layout: str) -> None:
    model = place_module(net(), layout)
    backward(model, place(X, layout))
    for p in model.parameters():
        settled = [Replicate() if q.is_partial() else q for q in p.placements]
        assert p.grad.placements == settled or p.grad.placements == p.placements


@every_layout
def test_no_sync_keeps_sums_pending_until_they_are_wanted(layout: str) -> None:
    model, plain = place_module(net(), "replicated" if layout != "grid" else layout), net()
    x = place(X, "first" if layout != "grid" else layout)
    with dtorch.no_sync():
        backward(model, x)
        if layout != "grid":
            assert any(p.is_partial() for p in model[0].weight.grad.placements)
    backward(model, x)
    backward(plain, X)
    backward(plain, X)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad)
        assert p.grad.placements == p.placements
