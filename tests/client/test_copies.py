"""Copies, pickles (also to another process), files with the default weights_only, state dicts and whole models: as with plain tensors."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch import Replicate, Shard

from .same import each, every_engine, every_layout, place, place_module, same

pytestmark = every_engine

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def shallow_copy(x: Any) -> Any:
    y = copy.copy(x)
    y.add_(1)
    return x, y


def deep_copy(x: Any) -> Any:
    y = copy.deepcopy(x)
    y.add_(1)
    return x, y


def deep_copy_of_a_leaf(x: Any) -> Any:
    w = nn.Parameter(x.clone())
    (w * 2).sum().backward()
    v = copy.deepcopy(w)
    with torch.no_grad():
        v.add_(1)
    (v * 3).sum().backward()
    return w, w.grad, v, v.grad, v.is_leaf


def deep_copy_of_a_leaf_that_is_no_parameter(x: Any) -> Any:
    w = x.clone().requires_grad_()
    (w * 2).sum().backward()
    w.tag = ["kept"]
    v = copy.deepcopy(w)
    return v, v.grad, v.tag, v.tag is w.tag, v.grad is w.grad


def deep_copy_keeps_sharing(x: Any) -> Any:
    w = nn.Parameter(x.clone())
    one = {"a": w, "b": [w, w.detach().clone()]}
    two = copy.deepcopy(one)
    return two["a"] is two["b"][0], two["a"] is w, two


def deep_copy_of_a_result_refused(x: Any) -> Any:
    return copy.deepcopy(nn.Parameter(x) * 2)


def deep_copy_of_a_hooked_leaf(x: Any) -> Any:
    w = nn.Parameter(x.clone())
    seen: list[Any] = []
    w.register_hook(lambda g: seen.append(g) or g * 5)
    v = copy.deepcopy(w)
    (v * 2).sum().backward()
    (w * 2).sum().backward()
    return v.grad, w.grad, len(seen)


def pickled(x: Any) -> Any:
    y = pickle.loads(pickle.dumps(x))
    z = pickle.loads(pickle.dumps(nn.Parameter(x.clone(), requires_grad=False)))
    y.add_(1)
    return x, y, z, pickle.loads(pickle.dumps({"x": x[1:, 2].clone(), "n": [x.t()]}))


def files(x: Any) -> Any:
    return (
        saved(x),
        saved({"x": [x, x.t()], "y": (x[0], 3)}),
        saved(nn.Parameter(x)),
        saved(x.requires_grad_()),
        saved(x.bool()),
    )


def files_of_halves(x: Any) -> Any:
    return saved(x.bfloat16()), saved(x.half()), saved(x.to(torch.complex64)), saved(x.long()), saved(x[:0])


def ordered(x: Any) -> Any:
    from collections import OrderedDict

    return saved(OrderedDict(a=x, b=x + 1))


@each(
    *[
        p
        for p in list(globals().values())
        if getattr(p, "__module__", None) == __name__ and callable(p) and p not in (net, saved)
    ]
)
@every_layout
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, X)


def state_dict_round_trip(model: Any, x: Any) -> Any:
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    result = model.load_state_dict(state)
    return model(x), list(state), str(result), model.state_dict()


def state_dict_is_live(model: Any, x: Any) -> Any:
    state = model.state_dict()
    with torch.no_grad():
        model[0].weight.add_(1)
    return (
        state["0.weight"],
        state["0.weight"].requires_grad,
        model.state_dict(keep_vars=True)["0.weight"] is model[0].weight,
    )


def loads_plain_values(model: Any, x: Any) -> Any:
    other = net()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    before = list(model.parameters())
    model.load_state_dict(other.state_dict())
    return model(x), all(a is b for a, b in zip(before, model.parameters(), strict=True))


def loads_by_assignment(model: Any, x: Any) -> Any:
    state = {k: v.clone() * 2 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    out = model(x)
    out.sum().backward()
    return out, model[0].weight.grad, isinstance(model[0].weight, nn.Parameter)


def wrong_shape_refused(model: Any, x: Any) -> Any:
    state = model.state_dict()
    state["0.weight"] = state["0.weight"][:2]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        return str(error)


def missing_refused(model: Any, x: Any) -> Any:
    state = dict(model.state_dict())
    del state["0.weight"]
    state["more"] = x
    result = model.load_state_dict(state, strict=False)
    return result.missing_keys, result.unexpected_keys


def whole_model_file(model: Any, x: Any) -> Any:
    model.eval()
    return saved(model, weights_only=False)(x)


def state_file(model: Any, x: Any) -> Any:
    state = saved(model.state_dict())
    model[0].weight.data.zero_()
    model.load_state_dict(state)
    return model(x)


def deep_copied_model(model: Any, x: Any) -> Any:
    other = copy.deepcopy(model)
    other(x).sum().backward()
    return other[0].weight.grad, model[0].weight.grad, other[1].running_mean, model[1].running_mean


def cast_model(model: Any, x: Any) -> Any:
    weight = model[0].weight
    model.to(torch.float64)
    out = model(x.double())
    out.sum().backward()
    grad = model[0].weight.grad
    model.float()
    return (
        out,
        grad,
        model[0].weight.dtype,
        model[0].weight is weight,
        model[0].weight.grad,
        model[1].num_batches_tracked.dtype,
    )


def half_model(model: Any, x: Any) -> Any:
    model.eval()
    model.bfloat16()
    return model[0].weight, model(x.bfloat16()).dtype, model.half()[0].weight, model.double()[0].weight


def moved_model(model: Any, x: Any) -> Any:
    return model.to("cpu")[0].weight, model.cpu()[0].bias, model.to(x)[0].weight, model.to(x.device)[0].weight


def model_edits(model: Any, x: Any) -> Any:
    model.zero_grad()
    model(x).sum().backward()
    model.zero_grad(set_to_none=False)
    zeroed = model[0].weight.grad
    model.requires_grad_(False)
    frozen = model(x).requires_grad
    model[3].weight.requires_grad_(True)
    model(x).sum().backward()
    model.register_buffer("extra", x)
    model.register_parameter("scale", nn.Parameter(x[0].clone()))
    return (
        zeroed,
        frozen,
        model[0].weight.grad,
        [n for n, _ in model.named_parameters()],
        [n for n, _ in model.named_buffers()],
    )


def module_init(model: Any, x: Any) -> Any:
    nn.init.constant_(model[0].weight, 0.5)
    nn.init.zeros_(model[0].bias)
    nn.init.ones_(model[3].bias)
    nn.init.eye_(model[3].weight)
    return model(x)


def module_hooks(model: Any, x: Any) -> Any:
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append(go[0]))
    model[3].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
    x.requires_grad_()
    model(x).sum().backward()
    return seen, x.grad, model[0].weight.grad


def shared_weights(model: Any, x: Any) -> Any:
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)
    a.weight = b.weight = nn.Parameter(x.t() @ x)
    a.bias = b.bias = nn.Parameter(x[0].clone())
    both = nn.Sequential(a, b)
    both(x).sum().backward()
    again = copy.deepcopy(both)
    return a.weight.grad, again[0].weight is again[1].weight, len(list(both.parameters())), list(both.state_dict())


def functional_state(model: Any, x: Any) -> Any:
    parameters = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(parameters * 2, model.parameters())
    return parameters, model(x)


@each(
    *[
        p
        for p in list(globals().values())
        if getattr(p, "__module__", None) == __name__ and callable(p) and "model" in p.__code__.co_varnames[:1]
    ]
)
@every_layout
def test_a_module(program: Any, layout: str) -> None:
    same(program, layout, net(), X)


@every_layout
def test_placements_stay(layout: str) -> None:
    x = place(X, layout)
    kept = x.placements if layout != "partial" else [Replicate()]
    assert copy.copy(x).placements == x.placements
    assert copy.deepcopy(x).placements == x.placements
    for y in (pickle.loads(pickle.dumps(x)), saved(x), saved({"x": x})["x"]):
        assert y.placements == kept
        assert y.device_mesh == x.device_mesh
    model = place_module(net(), layout)
    before = {n: p.placements for n, p in model.named_parameters()}
    model.load_state_dict(net().state_dict())
    model.to(torch.float64)
    assert {n: p.placements for n, p in model.named_parameters()} == before


def test_dtorch_values_go_into_plain_modules() -> None:
    model, plain = place_module(net(), "first"), net()
    with torch.no_grad():
        model[0].weight.mul_(3)
    plain.load_state_dict(model.state_dict())
    assert type(plain[0].weight.data) is torch.Tensor
    assert torch.equal(plain[0].weight, net()[0].weight * 3)


def test_names_of_a_mesh_are_kept() -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dtorch.from_torch(X, mesh, [Shard(0), Shard(1)])
    assert saved(x).device_mesh.mesh_dim_names == ("dp", "tp")


def test_another_process_reads_the_file(engine: str, tmp_path: Any) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": place(X, "first"), "w": nn.Parameter(place(X, "last"))}, path)
    script = f"import torch, dtorch\nd = torch.load({str(path)!r})\nprint(d['x'].placements, d['w'].placements, d['x'].sum().item())"
    env = {**os.environ, "DTORCH_ENGINE": engine}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith("[Shard(dim=0)] [Shard(dim=1)] "), out.stdout


def test_a_file_of_dtorch_tensors_says_what_is_needed_without_dtorch(tmp_path: Any) -> None:
    path = tmp_path / "x.pt"
    torch.save(place(X, "first"), path)
    script = f"import torch\ntorch.load({str(path)!r})"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert out.returncode
    assert "dtorch" in out.stderr


def test_swap_tensors() -> None:
    x, w = place(X, "first"), nn.Parameter(place(X * 2, "last"))
    torch.utils.swap_tensors(x, w)
    assert torch.equal(x.detach().to_torch(), X * 2)
    assert x.placements == [Shard(1)]
    assert isinstance(x, nn.Parameter)
    assert torch.equal(w.to_torch(), X)
    assert w.placements == [Shard(0)]
    (x * x).sum().backward()
    torch.testing.assert_close(x.grad.to_torch(), X * 4)
    assert x.grad.placements == x.placements


def test_modules_may_swap_their_tensors_when_they_are_cast() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model, plain = place_module(net(), "first"), net()
        model.to(torch.float64).load_state_dict(plain.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(
        model(place(X.double(), "first")).detach().to_torch(), plain.double()(X.double()).detach()
    )


@pytest.mark.parametrize("share", [True, False])
def test_a_data_loader_collates_tensors_on_the_mesh(share: bool) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    data, labels = place(X, "first"), place(torch.arange(4), "replicated")
    batches = list(DataLoader(TensorDataset(data, labels), batch_size=2, drop_last=share))
    assert torch.equal(torch.cat([b[0] for b in batches]).to_torch(), X)
    assert torch.cat([b[1] for b in batches]).tolist() == [0, 1, 2, 3]
