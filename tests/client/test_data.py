"""``x.data = …``: of our tensors, of plain parameters that become distributed in place, and as ``module.to(x.device)`` does it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import dtorch
from dtorch import Shard

from .same import compare, every_engine, every_layout, place

pytestmark = every_engine

MESH = dtorch.DeviceMesh("cpu", [0, 1])
X = torch.linspace(-2, 2, 24).reshape(4, 6)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trained(model: Any, x: Any, steps: int = 3) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return list(model.parameters()), list(model.buffers())


@every_layout
def test_a_plain_parameter_becomes_distributed_and_stays_the_same_object(layout: str) -> None:
    model = net()
    before = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for t in (*model.parameters(), *model.buffers()):
        t.data = place(t.data, layout)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert all(isinstance(p, nn.Parameter) and isinstance(p, dtorch.Tensor) for p in before)
    plain = net()
    model(place(X, layout)).pow(2).sum().backward()
    plain(X).pow(2).sum().backward()
    compare([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    compare(list(model.state_dict().values()), list(plain.state_dict().values()))


@every_layout
def test_a_module_moved_to_the_device_of_a_tensor_trains_there(layout: str) -> None:
    x = place(X, layout)
    model = net()
    optimizer_made_before = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to(x.device)
    assert optimizer_made_before.param_groups[0]["params"][0] is model[0].weight
    compare(trained(model, x), trained(net(), X))
    assert model[0].weight.device_mesh == x.device_mesh
    compare(
        trained(copy.deepcopy(model).to(torch.float64), x.double()),
        trained(copy.deepcopy(to_plain(model)).double(), X.double()),
    )


def to_plain(model: nn.Module) -> nn.Module:
    plain = net()
    plain.load_state_dict(model.state_dict())
    return plain


def test_a_module_moved_after_backward_keeps_its_gradients() -> None:
    x = place(X, "first")
    model, plain = net(), net()
    model(X).sum().backward()
    plain(X).sum().backward()
    model.to(x.device)
    model(x).sum().backward()
    plain(X).sum().backward()
    compare([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@every_layout
def test_plain_values_are_taken_where_the_target_is(layout: str) -> None:
    x = place(X, layout)
    x.data = X * 2
    compare(x, X * 2)
    if layout != "partial":
        assert x.placements == place(X, layout).placements
    w = nn.Parameter(place(X, layout))
    w.data = torch.ones(2, 3)
    compare(w.detach(), torch.ones(2, 3))
    u = torch.zeros(3, device=x.device)
    u.data = torch.ones(2)
    compare(u, torch.ones(2))


@every_layout
def test_it_changes_placements_values_and_dtype_together(layout: str) -> None:
    w = nn.Parameter(place(X, layout))
    w.data = dtorch.from_torch(X.double() * 2, dtorch.DeviceMesh("cpu", [1, 0]), [Shard(1)])
    assert (w.placements, w.dtype, w.requires_grad) == ([Shard(1)], torch.float64, True)
    (w * w).sum().backward()
    compare(w.grad, X.double() * 4)
    assert w.grad.placements == [Shard(1)]


@every_layout
def test_it_is_an_alias_that_autograd_does_not_watch(layout: str) -> None:
    w = nn.Parameter(place(X, layout))
    y = w.exp().sum()
    w.data.add_(1)
    assert w._version == 0
    y.backward()
    compare((w, w.grad), (nn.Parameter(X + 1), X.exp()))
    other = place(X, layout)
    w.data = other
    other.mul_(2)
    compare(w.detach(), X * 2)


def test_hooks_of_a_plain_parameter_are_not_lost_silently() -> None:
    p = nn.Parameter(X.clone())
    p.register_hook(lambda g: g * 2)
    with pytest.raises(TypeError, match="hooks"):
        p.data = place(X, "first")


def test_a_plain_target_of_set_is_refused() -> None:
    with pytest.raises(TypeError, match="from_torch"):
        torch.zeros(4, 6).set_(place(X, "first"))


def test_plain_data_works_as_before() -> None:
    p = nn.Parameter(X.clone())
    p.data = X * 2
    p.data.add_(1)
    assert torch.equal(p.detach(), X * 2 + 1)
    assert torch.equal(torch.compile(lambda a: a.data + 1, backend="eager")(p), X * 2 + 2)


class Mode(torch.overrides.TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Mode, lambda: dtorch.default_mesh(MESH), lambda: torch.device("cpu")])
def test_data_under_a_function_mode(mode: object) -> None:
    """torch hands the setter of ``.data`` to a mode by name: `default_mesh` and ``torch.device`` are such modes."""
    with mode():  # type: ignore[operator]
        model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 3))
        dtorch.distribute_module(model, MESH, {})
        plain, w = torch.zeros(2), torch.nn.Parameter(place(X, "first"))
        plain.data = torch.ones(2)
        w.data = w.data * 2
        assert model.to("cpu").double().cpu()(dtorch.ones(1, 3, dtype=torch.float64, device_mesh=MESH)).shape == (1, 3)
        assert model.parametrizations.weight.original.dtype == torch.float64
    torch.testing.assert_close(w.detach().to_torch(), X * 2)
    assert plain.sum() == 2


def test_a_data_loader_within_default_mesh() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(8, 1))
    with dtorch.default_mesh(MESH):
        for keywords in ({}, {"shuffle": True}, {"num_workers": 1}):
            batches = [x for (x,) in torch.utils.data.DataLoader(data, 4, **keywords)]
            assert sorted(torch.cat(batches).flatten().tolist()) == list(range(8))


@pytest.mark.parametrize("wrong", [None, 1.5, [1, 2], "x"])
def test_data_must_be_a_tensor(wrong: Any) -> None:
    x = place(X, "first")
    with pytest.raises(TypeError) as expected:
        torch.ones(2).data = wrong
    with pytest.raises(TypeError) as found:
        x.data = wrong
    assert str(found.value) == str(expected.value)
