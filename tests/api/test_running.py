"""Starting, settings, defaults, futures and the names of Graph: what the page of public names says under "Running"."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.errors import DeviceUnavailable, RemoteError


@pytest.fixture
def fresh() -> Any:
    """No cluster before, none after."""
    dtorch.shutdown()
    yield
    dtorch.shutdown()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("engine", ["simulate", "processes"])
class TestSettings:
    def test_a_later_larger_mesh_starts_more_workers(self, engine: str) -> None:
        dtorch.init(engine=engine)
        assert dtorch.is_initialized()
        assert dtorch.devices() == []
        x = dtorch.ones(4, device_mesh=DeviceMesh("cpu", [1]))
        assert dtorch.devices() == [torch.device("cpu", 1)]
        y = x.redistribute(DeviceMesh("cpu", [0, 1, 2]), [Shard(0)])
        assert dtorch.devices() == [torch.device("cpu", i) for i in range(3)]
        assert torch.equal((x + 1).to_torch(), torch.full((4,), 2.0))
        assert torch.equal((y + 1).to_torch(), torch.full((4,), 2.0))

    def test_sync_raises_at_the_line(self, engine: str) -> None:
        dtorch.init(engine=engine, sync=True)
        x = dtorch.ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]))
        with pytest.raises(RemoteError, match="index 9 is out of bounds"):
            x[torch.tensor([9])]

    def test_random_torch_is_bit_equal_to_torch(self, engine: str) -> None:
        dtorch.init(engine=engine, random="torch")
        mesh = DeviceMesh("cpu", [0, 1])
        torch.manual_seed(1)
        expected = [torch.rand(5), torch.nn.functional.dropout(torch.ones(5)), torch.randn(3)]
        dtorch.manual_seed(1)
        made = [
            dtorch.rand(5, device_mesh=mesh, placements=[Shard(0)]),
            torch.nn.functional.dropout(dtorch.ones(5, device_mesh=mesh, placements=[Shard(0)])),
            dtorch.randn(3, device_mesh=mesh),
        ]
        for a, b in zip(made, expected, strict=True):
            assert torch.equal(a.to_torch(), b)

    def test_shutdown_then_init(self, engine: str) -> None:
        for _ in range(2):
            dtorch.init(engine=engine)
            assert dtorch.ones(3, device_mesh=DeviceMesh("cpu", [0, 1])).sum().item() == 3
            dtorch.shutdown()
            assert not dtorch.is_initialized()
            assert dtorch.memory_stats() == {}

    def test_memory_stats(self, engine: str) -> None:
        dtorch.init(engine=engine)
        mesh = DeviceMesh("cpu", [0, 1])
        x = dtorch.ones(1024, device_mesh=mesh, placements=[Shard(0)])
        live = {device: stats["live"] for device, stats in dtorch.memory_stats(mesh).items()}
        assert live == {torch.device("cpu", 0): 2048, torch.device("cpu", 1): 2048}
        del x
        after = dtorch.memory_stats(mesh)[torch.device("cpu", 0)]
        assert after["live"] == 0
        assert after["peak"] >= 2048
        dtorch.memory_stats(reset_peak=True)
        assert dtorch.memory_stats()[torch.device("cpu", 0)]["peak"] == 0


@pytest.mark.usefixtures("fresh")
def test_more_processes_than_the_limit() -> None:
    dtorch.init(engine="processes", devices=2)
    dtorch.ones(2, device_mesh=DeviceMesh("cpu", [0, 1]))
    with pytest.raises(DeviceUnavailable, match=r"limit of 2 workers.*devices=4"):
        dtorch.ones(2, device_mesh=DeviceMesh("cpu", [0, 1, 2, 3]))
    assert dtorch.ones(2, device_mesh=DeviceMesh("cpu", [0, 1])).sum().item() == 2  # and nothing is broken
    if not torch.cuda.is_available():
        with pytest.raises(DeviceUnavailable, match="cuda:0 does not exist here, only cpu"):
            dtorch.ones(2, device_mesh=DeviceMesh("cuda", [0, 1]))


@pytest.mark.usefixtures("fresh")
def test_the_simulation_has_no_limit() -> None:
    dtorch.init(engine="simulate", devices=2)
    mesh = dtorch.init_device_mesh("cpu", (4, 108), ("dp", "tp"))
    values = torch.arange(864.0 * 4).reshape(864, 4)
    x = dtorch.from_torch(values, mesh, [Shard(1), Shard(0)])
    assert torch.equal((x * 2).sum(0).to_torch(), (values * 2).sum(0))
    assert len(dtorch.devices()) == 432


def test_settings_from_the_environment() -> None:
    script = "import dtorch; dtorch.ones(2, device_mesh=dtorch.DeviceMesh('cpu', [0, 99])); print(dtorch.client.runtime.current().config)"
    environment = {
        **os.environ,
        "DTORCH_ENGINE": "simulate",
        "DTORCH_DEVICES": "7",
        "DTORCH_SYNC": "1",
        "DTORCH_LOG": "debug",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "engine='simulate', devices=7" in done.stdout
    assert "sync=True" in done.stdout
    assert "program" in done.stderr  # shown by DTORCH_LOG=debug


@pytest.mark.usefixtures("engine")
class TestDefaults:
    def test_default_mesh_nests_and_ends(self) -> None:
        outer, inner = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])
        with dtorch.default_mesh(outer):
            with dtorch.default_mesh(inner):
                assert torch.ones(2).device_mesh == inner
            assert torch.ones(2).device_mesh == outer
            assert dtorch.ones(2, placements=[Shard(0)]).placements == [Shard(0)]
        assert type(torch.ones(2)) is torch.Tensor
        with pytest.raises(ZeroDivisionError), dtorch.default_mesh(outer):
            raise ZeroDivisionError
        assert type(torch.ones(2)) is torch.Tensor

    def test_manual_seed_is_torchs(self) -> None:
        mesh = DeviceMesh("cpu", [0, 1])
        values = []
        for seed in (torch.manual_seed, dtorch.manual_seed):
            seed(4)
            values.append(dtorch.rand(3, device_mesh=mesh).to_torch())
        assert torch.equal(*values)
        assert not torch.equal(values[0], dtorch.rand(3, device_mesh=mesh).to_torch())

    def test_graph(self) -> None:
        graph = dtorch.Graph.default_graph()
        assert graph is dtorch.default_graph()
        mesh = DeviceMesh("cpu", [0, 1])
        assert graph.default_device_mesh == DeviceMesh("cpu")
        with graph.device_mesh_guard(mesh), graph.dtype_guard(torch.float64):
            assert graph.default_device_mesh == mesh
            assert graph.default_dtype == torch.float64
            x = torch.ones(2)
        assert (x.device_mesh, x.dtype) == (mesh, torch.float64)
        assert graph.default_dtype == torch.float32
        assert graph.satisfy(mesh)
        assert graph.satisfy(DeviceMesh("cuda", [0])) == torch.cuda.is_available()
        graph.sync()
        assert graph.sync_future().get(timeout=60) is None
        graph.empty_cache()
        assert graph.get_memory_stats(mesh)[torch.device("cpu", 0)]["live"] >= 16

    def test_a_failure_reaches_sync_future(self) -> None:
        x = dtorch.ones(4, device_mesh=DeviceMesh("cpu", [0, 1]))
        x[torch.tensor([9])]
        with pytest.raises(RemoteError, match="out of bounds"):
            dtorch.default_graph().sync_future().get(timeout=60)
        dtorch.synchronize()  # it was told once


@pytest.mark.usefixtures("engine")
class TestFutures:
    @staticmethod
    def future(n: int = 3) -> dtorch.TensorFuture:
        return dtorch.arange(n, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)]).to_torch_async()

    def test_values(self) -> None:
        future = self.future()
        assert future.wait(timeout=60)
        assert future.is_ready()
        assert future.done()
        assert torch.equal(future.get(timeout=0), torch.arange(3))
        assert future.result() is future.get()
        assert future.exception() is None

    def test_a_snapshot_of_its_place(self) -> None:
        x = dtorch.ones(3, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Replicate()])
        before = x.to_torch_async()
        x.zero_()
        assert torch.equal(before.get(), torch.ones(3))
        assert torch.equal(x.to_torch(), torch.zeros(3))

    def test_callbacks_run_in_one_thread_and_may_raise(self, caplog: pytest.LogCaptureFixture) -> None:
        threads: list[Any] = []
        done = threading.Event()

        def raise_(future: dtorch.TensorFuture) -> None:
            threads.append(threading.current_thread())
            raise SystemExit("in a callback")

        with caplog.at_level(logging.ERROR, "dtorch"):
            future = self.future()
            future.add_done_callback(raise_)
            future.add_done_callback(lambda f: threads.append(threading.current_thread()))
            future.add_done_callback(lambda f: done.set())
            assert done.wait(60)
        assert len(set(threads)) == 1
        assert threads[0] is not threading.main_thread()
        assert "a TensorFuture callback raised" in caplog.text

    def test_await(self) -> None:
        async def main() -> list[torch.Tensor]:
            loop = asyncio.get_running_loop()
            values = await asyncio.gather(*[self._one(n) for n in (1, 2)])
            assert asyncio.get_running_loop() is loop
            return values

        assert [v.shape[0] for v in asyncio.run(main())] == [1, 2]

    async def _one(self, n: int) -> torch.Tensor:
        return await self.future(n)

    def test_as_completed(self) -> None:
        futures = [self.future(n) for n in (1, 2, 3)]
        assert {len(f.get()) for f in dtorch.as_completed(futures, timeout=60)} == {1, 2, 3}
        with pytest.raises(TimeoutError, match="within 0"):
            list(dtorch.as_completed([dtorch.TensorFuture()], timeout=0))
        with pytest.raises(TimeoutError, match="within 0"):
            dtorch.TensorFuture().get(timeout=0)


@pytest.mark.usefixtures("engine")
def test_to_keeps_mesh_and_placements() -> None:
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    x = dtorch.ones(4, 2, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    assert x.to("cpu") is x.cpu() is x.to(x.device) is x
    y = x.to("cpu", torch.float64)
    assert (y.dtype, y.device_mesh, y.placements) == (torch.float64, mesh, [Shard(0)])
    assert x.to(device="cpu", dtype=torch.float64).dtype == x.to(torch.float64).dtype == x.to(y).dtype == torch.float64
    assert x.to("cpu", copy=True) is not x
    assert x.to("meta").is_meta
    y.sum().backward()
    assert torch.equal(x.grad.to_torch(), torch.ones(4, 2))
