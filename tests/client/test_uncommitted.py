"""Tensors made without a mesh are tensors like any other and join the mesh of what they meet; plain ones are taken as they are."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dtorch
from dtorch import Replicate, Shard

from .same import LAYOUTS, compare, each, every_engine, every_layout, place, same

pytestmark = every_engine

X = torch.linspace(-2, 2, 24).reshape(4, 6)


def views_made_before_and_after(x: Any) -> Any:
    u = torch.zeros(4, 6, device=x.device)
    row, column, flat, turned = u[1], u[:, 2], u.view(-1), u.t()
    u += x
    row.add_(10)
    column.mul_(2)
    flat[7] = -1
    turned[3].zero_()
    after = u[2:]
    after.sub_(1)
    return u, row, column, flat, turned, after


def a_view_joins_first(x: Any) -> Any:
    u = torch.arange(24.0, device=x.device)
    grid = u.view(4, 6)
    row = grid[2]
    row.copy_(x[0])
    u[0] = 5
    grid.mul_(x)
    return u, grid, row


def a_view_of_what_joined_is_a_destination(x: Any) -> Any:
    u = torch.zeros(4, 6, device=x.device)
    row, flat = u[1], u.view(-1)
    u += x
    torch.add(row, 1, out=row)
    out = torch.empty(0, device=x.device)
    torch.mul(row, 2, out=out)
    return u, row, flat, out, torch.zeros_like(row), row + row


def dtype_views(x: Any) -> Any:
    u = torch.zeros(4, 6, device=x.device)
    bits = u.view(torch.int32)
    halves = u.view(torch.int16)
    u.copy_(x)
    return u, bits, halves


def dtype_view_after(x: Any) -> Any:
    u = torch.zeros(4, 6, device=x.device)
    row = u[1:]
    u.copy_(x)
    return row.view(torch.int32), u.view(torch.uint8)


def complex_views(x: Any) -> Any:
    u = torch.zeros(4, 3, dtype=torch.complex64, device=x.device)
    pairs = torch.view_as_real(u)
    real, imag = u.real, u.imag
    pairs.copy_(x.reshape(4, 3, 2))
    real.add_(1)
    imag[0] = 9
    return u, pairs, real, imag, u.conj()


def masks_and_positions(x: Any) -> Any:
    n = x.shape[0]
    mask = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
    positions = torch.arange(n, device=x.device)
    bias = torch.zeros(n, n, device=x.device).masked_fill(~mask, float("-inf"))
    one_hot = F.one_hot(positions, 6).to(x.dtype)
    return (
        (x @ x.t() + bias).softmax(-1),
        x[positions],
        x[positions.flip(0), :2],
        x * one_hot,
        torch.where(mask, x[:, :4], bias),
    )


def from_lists_and_arrays(x: Any) -> Any:
    a = torch.tensor([1.0, 2, 3, 4, 5, 6], device=x.device)
    b = torch.as_tensor(np.ones(6, dtype=np.float32), device=x.device)
    c = torch.from_numpy(np.arange(6))
    d = torch.full((6,), 2.5, device=x.device, dtype=x.dtype)
    e = torch.linspace(0, 1, 6, device=x.device)
    return x * a + b - c + d / (e + 1), x.new_tensor([1.0, 2]), x.new_ones(3), torch.tensor(3, device=x.device) + x


def cache(x: Any) -> Any:
    kept = torch.zeros(8, 6, device=x.device)
    seen = []
    for step in range(2):
        kept[step * 4 : step * 4 + 4] = x + step
        seen.append(kept[: step * 4 + 4].sum(0))
    kept.index_copy_(0, torch.tensor([7], device=x.device), x[:1])
    return kept, seen


def trained(x: Any) -> Any:
    w = torch.ones(6, device=x.device, requires_grad=True)
    v = torch.zeros(4, 1, device=x.device, requires_grad=True)
    ((x * w + v) ** 2).sum().backward()
    first = w.grad.clone(), v.grad.clone()
    with torch.no_grad():
        w -= 0.1 * w.grad
    w.grad.zero_()
    (x * w).sum().backward()
    return first, w, w.grad, v


def optimized(x: Any) -> Any:
    w = torch.nn.Parameter(torch.ones(6, device=x.device))
    optimizer = torch.optim.AdamW([w], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (x * w).pow(2).sum().backward()
        optimizer.step()
    return w, optimizer.state[w]["exp_avg"]


def module_on_the_device(x: Any) -> Any:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 3)
    layer = layer.to(x.device)
    out = layer(x)
    out.sum().backward()
    return out, layer.weight.grad, layer.bias


def copied(x: Any) -> Any:
    u = torch.arange(6.0, device=x.device)
    a, b, c = copy.copy(u), copy.deepcopy(u), pickle.loads(pickle.dumps(u))
    u.add_(x[0])
    return u, a, b, c, u.clone(), u.detach()


def gets(x: Any) -> Any:
    u = torch.arange(6, device=x.device)
    return u.tolist(), u[2].item(), int(u[3]), [1, 2, 3][u[1]], len(u), u.sum().item(), 3 in u, [int(i) for i in u]


def swapped(x: Any) -> Any:
    u, v = torch.zeros(6, device=x.device), x[0].clone()
    torch.utils.swap_tensors(u, v)
    return u, v


def data_set(x: Any) -> Any:
    u = torch.zeros(6, device=x.device)
    u.data = x[0]
    w = torch.nn.Parameter(torch.zeros(4, 6, device=x.device))
    w.data = x * 2
    w.data.mul_(2)
    (w * x).sum().backward()
    return u, w, w.grad


def data_written(x: Any) -> Any:
    u = torch.zeros(4, 6, device=x.device)
    u.data.add_(1)
    view = u.data[0]
    u.data.copy_(x)
    view.mul_(2)
    return u, view


def out_argument(x: Any) -> Any:
    u = torch.empty(4, 6, device=x.device)
    torch.mul(x, 2, out=u)
    v = torch.empty(0, device=x.device)
    torch.add(x, 1, out=v)
    return u, v


def lists_of_both(x: Any) -> Any:
    u = torch.ones(1, 6, device=x.device)
    return torch.cat([u, x, u]), torch.stack([u[0], x[0]]), torch.einsum("ij,kj->ik", x, u), torch.block_diag(u, x)


def in_place_results(x: Any) -> Any:
    u = torch.zeros(6, device=x.device)
    u.add_(x.sum(0)).mul_(2)
    v = torch.zeros(4, 6, device=x.device)
    v[x > 0] = 1
    v[:, 0] = x[:, 0]
    v[torch.tensor([1, 2], device=x.device)] += x[:2]
    return u, v, v.view(2, 12)


def set_by_indices(x: Any) -> Any:
    u = torch.zeros(4, 6, device=x.device)
    u.scatter_(1, x.abs().long(), 1.0)
    u.scatter_add_(0, torch.zeros(1, 6, dtype=torch.long, device=x.device), x[:1])
    return u, u.gather(1, x.abs().long())


def expanded(x: Any) -> Any:
    u = torch.arange(6.0, device=x.device).expand(4, 6)
    v = torch.arange(4.0, device=x.device)[:, None]
    return u * x, u, v * x, v.expand(-1, 6) + x, u.t() @ x


def overlapping(x: Any) -> Any:
    u = torch.arange(8.0, device=x.device)
    windows = u.unfold(0, 4, 2)
    u[:6] += x[0]
    return windows, u


def empty_ones(x: Any) -> Any:
    u = torch.zeros(0, 6, device=x.device)
    return torch.cat([u, x]), u + x[:0], u.sum(), (u.t() @ x[:0]).shape


def numbers(x: Any) -> Any:
    u = torch.tensor(2, device=x.device)
    v = torch.tensor(2.5, dtype=torch.float64, device=x.device)
    return x * u, x + v, u**2, u / 2, x.long() * v, (x > u).dtype, v + u, torch.result_type(x, v)


PROGRAMS = [p for p in list(globals().values()) if getattr(p, "__module__", None) == __name__ and callable(p)]


@each(*PROGRAMS)
@every_layout
def test_a_program(program: Any, layout: str) -> None:
    same(program, layout, X)


@each(*PROGRAMS)
def test_a_program_among_uncommitted_tensors_only(program: Any) -> None:
    compare(program(dtorch.from_torch(X)), program(X))


def test_a_destination_takes_the_shards_of_its_source_and_an_operand_is_replicated() -> None:
    x = place(X, "first")
    u = torch.zeros(4, 6, device=x.device)
    u.copy_(x)
    assert u.placements == [Shard(0)]
    v = torch.zeros(4, 6, device=x.device)
    x + v
    assert v.placements == [Replicate()]
    assert v.device_mesh == x.device_mesh


def test_gradients_of_a_leaf_that_joined_have_its_placements() -> None:
    x = place(X, "first")
    w = torch.ones(6, 6, device=x.device, requires_grad=True)
    (x @ w).sum().backward()
    assert w.grad.placements == w.placements == [Replicate()]
    v = torch.zeros(4, 6, device=x.device, requires_grad=True)
    with torch.no_grad():
        v.copy_(x)
    (place(X, "replicated") * v).sum().backward()
    assert v.grad.placements == v.placements == [Shard(0)]


def test_a_view_of_all_the_memory_joins_with_nothing_but_its_values() -> None:
    """Positions, which each step of a decode loop makes anew: ``arange(n).unsqueeze(0)``."""
    x = dtorch.from_torch(torch.ones(1, 3), dtorch.DeviceMesh("cpu", [0, 1]))
    base = torch.arange(3, device=x.device)
    view = base.unsqueeze(0)
    with dtorch.record() as r:
        found = x + view
    assert [one.name for one in r.ops] == ["aten.add.Tensor"]
    same(found, torch.arange(3)[None] + torch.ones(1, 3))
    view += 1
    last = base[1:]
    base *= 2
    same(view, torch.tensor([[2, 4, 6]]))
    same(last, torch.tensor([4, 6]))


@pytest.mark.parametrize("take", [torch.conj, lambda u: u.conj().imag], ids=["conj", "imag of conj"])
@pytest.mark.parametrize("first", ["base", "view", "alone"])
def test_lazy_views_join_with_their_flag(take: Any, first: str) -> None:
    values = [1 + 2j, 3 - 1j]
    x = dtorch.from_torch(torch.ones(2), dtorch.DeviceMesh("cpu", [0, 1]))
    base, plain = torch.tensor(values, device=x.device), torch.tensor(values)
    view, expected = take(base), take(plain)
    if first == "base":
        same(x + base, plain + 1)
    elif first == "alone":
        del base
    for _ in range(2):
        same(x + view, expected + 1)
    if first != "alone":
        view *= 2
        expected *= 2
        same(base, plain)
    same(view, expected)


def test_joined_to_one_mesh_it_is_refused_by_another() -> None:
    x = place(X, "first")
    y = dtorch.from_torch(X, dtorch.DeviceMesh("cpu", [2, 3]), [Shard(0)])
    u = torch.ones(6, device=x.device)
    view = u[:3]
    x * u
    with pytest.raises(dtorch.errors.MeshMismatch, match="redistribute"):
        y * u
    with pytest.raises(dtorch.errors.MeshMismatch, match="redistribute"):
        y[:, :3] * view


FACTORIES = [
    lambda **k: torch.full((2,), 3, **k),
    lambda **k: torch.full((2,), True, **k),
    lambda **k: torch.full((), 1 + 2j, **k),
    lambda **k: torch.full((2, 2), 1.5, requires_grad=True, **k),
    lambda **k: torch.arange(3, **k),
    lambda **k: torch.arange(1, 7, 2, dtype=torch.int32, **k),
    lambda **k: torch.arange(0, 1, 0.25, **k),
    lambda **k: torch.arange(5, 2, -1, layout=torch.strided, **k),
    lambda **k: torch.ones(2, 3, **k),
    lambda **k: torch.ones((), dtype=torch.complex64, **k),
    lambda **k: torch.zeros(0, 3, dtype=torch.float16, **k),
]


@pytest.mark.parametrize("make", FACTORIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_factory_makes_is_what_it_makes_on_the_cpu(make: Any, dtype: torch.dtype) -> None:
    device = place(X, "first").device
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found, expected = make(device=device), make()
    finally:
        torch.set_default_dtype(before)
    assert type(found) is dtorch.Tensor
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    assert (found.requires_grad, found.is_leaf) == (expected.requires_grad, expected.is_leaf)
    assert torch.equal(found.to_torch(), expected)


def test_a_view_of_what_joined_is_filled_at_random() -> None:
    x = place(X, "first")
    u = torch.zeros(4, 6, device=x.device)
    row = u[1]
    u += x
    assert row.uniform_(3, 4) is row
    found = u.to_torch()
    assert ((found[1] >= 3) & (found[1] < 4)).all()
    assert torch.equal(found[2:], X[2:])


def test_each_uncommitted_tensor_goes_its_own_way() -> None:
    x = place(X, "first")
    y = dtorch.from_torch(X, dtorch.DeviceMesh("cpu", [2, 3]), [Shard(0)])
    u, v = torch.ones(6, device=x.device), torch.ones(6, device=x.device)
    compare((x * u, y * v, u.clone()), (X * 1, X * 1, torch.ones(6)))
    assert u.device_mesh == x.device_mesh
    assert v.device_mesh == y.device_mesh


@every_layout
def test_plain_tensors_are_copied_when_the_op_is_called(layout: str) -> None:
    x, plain = place(X, layout), torch.ones(6)
    y = x * plain
    plain.zero_()
    z = x * plain
    plain.requires_grad_()
    (x * plain).sum().backward()
    compare((y, z, plain.grad), (X, X * 0, X.sum(0)))


@every_layout
def test_plain_destinations_are_filled_or_refused(layout: str) -> None:
    x = place(X, layout)
    plain = torch.zeros(4, 6)
    plain.copy_(x)
    plain[1] = x[0]
    plain[:, 2:3] = x[:, :1]
    plain[plain > 1] = x[0, 0]
    expected = X.clone()
    expected[1] = X[0]
    expected[:, 2:3] = X[:, :1]
    expected[expected > 1] = X[0, 0]
    compare(plain, expected)
    for call in (
        lambda: plain.add_(x),
        lambda: plain.mul_(x),
        lambda: torch.add(x, x, out=plain),
        lambda: plain.index_add_(0, torch.tensor([0]), x[:1]),
    ):
        with pytest.raises((TypeError, dtorch.errors.DTorchError), match=r"dtorch\.from_torch"):
            call()


@every_layout
def test_views_without_elements_join_too(layout: str) -> None:
    x = place(X, layout)
    u = torch.zeros(3, 0, device=x.device)
    v = u[2]
    compare((x[:, :0] @ v, u + 1, v), (X[:, :0] @ torch.zeros(0), torch.zeros(3, 0), torch.zeros(0)))


@every_layout
def test_results_of_plain_tensors_go_to_placed_destinations(layout: str) -> None:
    x, plain = place(X, layout), torch.arange(6.0)
    torch.add(plain, 1, out=x[0])
    torch.eq(plain[:3], plain[:3], out=(empty := x.new_empty(0)))
    expected = X.clone()
    expected[0] = plain + 1
    compare((x, empty), (expected, torch.ones(3)))


def test_layouts_cover_what_the_promise_says() -> None:
    assert {"first", "last", "replicated", "partial", "uneven", "grid"} == set(LAYOUTS)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kinds", ["placed plain", "plain placed", "placed uncommitted", "plain uncommitted"])
def test_composites_that_compare_devices_take_any_mix(engine: str, mode, kinds: str) -> None:
    """Under inference_mode they arrive whole, and their Python decompositions look at ``.device``."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    placed = dtorch.ones(3, device_mesh=mesh)
    make = {
        "placed": lambda t: dtorch.distribute_tensor(t, mesh, [dtorch.Shard(0)]),
        "plain": lambda t: t,
        "uncommitted": lambda t: torch.tensor(t.tolist(), device=placed.device),
    }
    signal, window = torch.rand(20), torch.rand(8)
    first, second = kinds.split()
    with mode():
        spectrum = torch.stft(make[first](signal), 8, window=make[second](window), return_complex=True)
        expected = torch.stft(signal, 8, window=window, return_complex=True)
        assert torch.allclose(spectrum.to_torch(), expected)
        again = torch.istft(spectrum, 8, window=make[second](window), length=20)
        assert torch.allclose(again.to_torch(), torch.istft(expected, 8, window=window, length=20))
