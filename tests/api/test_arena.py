"""`init(arena_bytes=)`: values larger than the shared memory of a worker, and none at all, give the same."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.client import runtime

TOO_LARGE = 1 << 50


@pytest.fixture(params=["small", "gloo"])
def workers(request: pytest.FixtureRequest) -> Iterator[None]:
    dtorch.shutdown()
    if request.param == "small":
        dtorch.init(engine="processes", arena_bytes=1 << 16)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dtorch.zeros(2, device_mesh=DeviceMesh("cpu", [0, 1, 2]))
    else:
        dtorch.init(engine="processes", arena_bytes=TOO_LARGE)
        with pytest.warns(UserWarning, match=r"no room.*1125899906842624 bytes.*gloo.*DTORCH_ARENA_BYTES"):
            dtorch.zeros(2, device_mesh=DeviceMesh("cpu", [0, 1, 2]))
    yield
    dtorch.shutdown()


@pytest.mark.usefixtures("workers")
def test_large_values() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    x = torch.randint(-9, 9, (301, 501)).float()
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        there = dtorch.distribute_tensor(x, mesh, placements)
        assert torch.equal(there.to_torch(), x)
        for target in (Shard(1), Replicate(), Shard(0)):
            assert torch.equal(there.redistribute(mesh, [target]).to_torch(), x)
        w = torch.randint(-9, 9, (501, 203)).float()
        y = there @ dtorch.distribute_tensor(w, mesh, [Shard(0)])
        assert torch.equal(y.to_torch(), x @ w)
        assert torch.equal(there.redistribute(DeviceMesh("cpu", [1]), [Replicate()]).to_torch(), x)
    summed = dtorch.distribute_tensor(x, mesh, [Partial()])
    assert torch.equal(summed.redistribute(mesh, [Replicate()]).to_torch(), x)


@pytest.mark.usefixtures("workers")
def test_ring_attention_and_failures() -> None:
    mesh = dtorch.init_device_mesh("cpu", (3,), ("ring_cp",))
    q, k, v = (torch.randn(1, 2, 300, 64) for _ in range(3))
    split = [dtorch.distribute_tensor(t, mesh, [Shard(2)]) for t in (q, k, v)]
    expected = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(scaled_dot_product_attention(*split, is_causal=True).to_torch(), expected)
    table = dtorch.distribute_tensor(torch.randn(400, 300), mesh, [Shard(1)])
    bad = torch.nn.functional.embedding(dtorch.distribute_tensor(torch.tensor([400]), mesh, [Replicate()]), table)
    with pytest.raises(dtorch.errors.RemoteError):
        bad.redistribute(mesh, [Replicate()]).to_torch()
    assert torch.equal(table.redistribute(mesh, [Shard(0)]).to_torch(), table.to_torch())


@pytest.mark.usefixtures("workers")
def test_a_dead_worker_is_told() -> None:
    mesh = DeviceMesh("cpu", [0, 1, 2])
    x = dtorch.distribute_tensor(torch.randn(500, 500), mesh, [Shard(0)])
    dtorch.synchronize()
    found = runtime.current()
    assert found is not None
    os.kill(found.engine.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(dtorch.errors.WorkerLost):
        x.redistribute(mesh, [Replicate()]).to_torch()


@pytest.mark.usefixtures("workers")
def test_a_captured_step_with_overlap() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    x, w1, w2 = torch.randn(200, 160), torch.randn(160, 320) / 16, torch.randn(320, 160) / 16

    class Layers(torch.nn.Module):
        def __init__(self, w1: torch.Tensor, w2: torch.Tensor) -> None:
            super().__init__()
            self.w1, self.w2 = torch.nn.Parameter(w1), torch.nn.Parameter(w2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.relu(x @ self.w1) @ self.w2
            return x

    def step(layers: Layers, x: torch.Tensor) -> torch.Tensor:
        layers.zero_grad()
        y = layers(x)
        y.sum().backward()
        return y.detach()

    plain = Layers(w1, w2)
    placed = Layers(dtorch.distribute_tensor(w1, mesh, [Shard(1)]), dtorch.distribute_tensor(w2, mesh, [Shard(0)]))
    expected = step(plain, x)
    captured = dtorch.compile(lambda x: step(placed, x))
    for _ in range(3):
        found = captured(dtorch.distribute_tensor(x, mesh, [Replicate()]))
        torch.testing.assert_close(found.to_torch(), expected)
        for one, other in ((placed.w1, plain.w1), (placed.w2, plain.w2)):
            torch.testing.assert_close(one.grad.to_torch(), other.grad, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]
