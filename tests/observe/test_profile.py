"""`profile` writes what the client and every worker did, on one clock, with arrows from issue to run."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.client.controller import Controller
from dtorch.observe import profiling, timing

from .traces import CLIENT, Trace

pytestmark = pytest.mark.usefixtures("engine")

MESH = DeviceMesh("cpu", [0, 1], ("tp",))


def placed(*placements: dtorch.Placement, shape: tuple[int, ...] = (4, 6)) -> dtorch.Tensor:
    return dtorch.ones(shape, device_mesh=MESH, placements=list(placements))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_one_trace_of_the_client_and_all_workers(file: Path) -> None:
    x = placed(Shard(1))
    with dtorch.profile(file):
        y = x + x  # the first line
        total = y.softmax(1).sum()
        assert total.to_torch().item() == pytest.approx(4)
    trace = Trace(file)
    trace.check()
    assert trace.about["left_out_client"] == trace.about["left_out_workers"] == 0
    assert {CLIENT: "client", 1: "worker 0", 2: "worker 1"}.items() <= trace.names.items()

    (call,) = [s for s in trace.of(CLIENT) if s.name == "aten.add.Tensor"]
    assert call.about["line"].startswith(__file__)
    assert call.about["line"].endswith("# the first line")
    (issue,) = [s for s in trace.of(CLIENT) if s.name == "issue aten.add.Tensor"]
    assert issue.inside(call)
    assert any(s.name == "wait" and "total.to_torch()" in s.about.get("line", "") for s in trace.of(CLIENT))
    arrows = list(trace.arrows.values())
    for worker in (1, 2):
        (run,) = [s for s in trace.of(worker, "program") if s.name == "aten.add.Tensor"]
        assert run.about["line"] == call.about["line"]
        (issued,) = [start for start, end in arrows if end[1:] == (run.track, run.start)]
        assert issue.start <= issued[2] <= issue.stop
        (gather,) = [s for s in trace.of(worker, "communication") if s.name == "all_gather"]
        assert gather.about["bytes"] == 48
        assert gather.about["axes"] == ["tp"]
        assert gather.about["asked for"] is False
        assert any(gather.inside(s) and s.name == "aten._softmax.default" for s in trace.of(worker, "program"))
    assert [s for s in trace.of(1, "command") if s.name == "read"]  # a GET, by which the value came


def test_the_clock_is_that_of_everybody(file: Path) -> None:
    """What Python reads between two ops falls between their spans here and on the workers."""
    assert timing.clock is time.monotonic_ns
    for name in ("monotonic", "perf_counter"):
        assert "CLOCK_MONOTONIC" in time.get_clock_info(name).implementation
    x = placed(Shard(0))
    with dtorch.profile(file):
        x.exp()
        dtorch.synchronize()
        between = time.monotonic_ns()
        x.log()
    trace = Trace(file)
    assert trace.about["clock"] == "CLOCK_MONOTONIC"
    between -= trace.about["begun_ns"]
    exp, log = ([s for s in trace.spans if s.name == f"aten.{op}.default"] for op in ("exp", "log"))
    assert {s.track[0] for s in exp} == {s.track[0] for s in log} == {CLIENT, 1, 2}
    assert max(s.stop for s in exp) <= between <= min(s.start for s in log)


def test_a_clock_of_another_machine() -> None:
    assert timing.clock_difference(100, 150, 200) == 0
    assert timing.clock_difference(100, 5000, 200) == 4850


def test_shifts_of_a_ring_and_transfers_between_meshes(file: Path) -> None:
    ring = DeviceMesh("cpu", [0, 1], ("ring_cp",))
    q = dtorch.rand(1, 2, 8, 4, device_mesh=ring, placements=[Shard(2)])
    with dtorch.profile(file):
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        placed(Shard(0)).redistribute(DeviceMesh("cpu", [1, 2]), [Shard(0)])
    trace = Trace(file)
    trace.check()
    for worker in (1, 2):
        assert {"shift", "shift arrives"} <= {s.name for s in trace.of(worker, "communication")}
    assert "transfer" in {s.name for s in trace.of(3, "communication")}


def test_a_compiled_call_is_one_span_with_its_exchanges(file: Path) -> None:
    x = placed(Shard(1))

    @dtorch.compile
    def rows(x: dtorch.Tensor) -> dtorch.Tensor:
        return x.softmax(1).exp().sum(1)

    rows(x)  # recorded
    with dtorch.profile(file), dtorch.record() as r:
        rows(x)
    trace = Trace(file)
    trace.check()
    (call,) = [s for s in trace.of(CLIENT) if s.name.endswith("rows") and not s.name.startswith("issue")]
    assert call.about["line"].endswith("rows(x)")
    for worker in (1, 2):
        (run,) = trace.of(worker, "program")
        assert run.name == call.name
        (gather,) = trace.of(worker, "communication")
        assert gather.name == "all_gather"
        assert gather.inside(run)
    assert [op.name for op in r.ops] == [call.name]


def test_workers_that_start_within(file: Path) -> None:
    with dtorch.profile(file):
        x = dtorch.ones(4, device_mesh=DeviceMesh("cpu", [5, 6]), placements=[Shard(0)])
        x.exp()
    trace = Trace(file)
    trace.check()
    for worker in (6, 7):
        assert "aten.exp.default" in {s.name for s in trace.of(worker, "program")}


def test_backward_names_the_forward_line_too(file: Path) -> None:
    x = placed(Shard(0)).requires_grad_()
    with dtorch.profile(file):
        y = x.tanh()
        y.sum().backward()
    (run,) = [s for s in Trace(file).of(1, "program") if s.name == "aten.tanh_backward.default"]
    assert run.about["line"].endswith("y = x.tanh()")


def test_an_exception_passes_and_the_file_is_written(file: Path) -> None:
    x = placed(Replicate())
    index = dtorch.from_torch(torch.tensor([1, 99]), MESH, [Shard(0)])
    with pytest.raises(dtorch.errors.RemoteError, match="index out of range"), dtorch.profile(file):
        torch.index_select(x, 0, index).to_torch()
    trace = Trace(file)
    trace.check()
    assert {"aten.index_select.default"} <= {s.name for s in trace.of(2, "program")}
    with pytest.raises(KeyError), dtorch.profile(file):
        raise KeyError
    Trace(file)


def test_bad_calls(file: Path, tmp_path: Path) -> None:
    ran = []
    file.write_text("kept")
    for path, error in (
        (3, TypeError),
        ("", IsADirectoryError),
        (tmp_path, IsADirectoryError),
        (file / "below" / "a file", OSError),
    ):
        with pytest.raises(error), dtorch.profile(path):  # type: ignore[arg-type]
            ran.append(path)
    outer, nested = dtorch.profile(tmp_path / "outer.json"), dtorch.profile(file)
    with pytest.raises(dtorch.errors.DTorchError, match="do not nest"), outer, nested:
        ran.append(file)
    assert not ran
    assert file.read_text() == "kept"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["outer.json", "trace.json"]


def test_nothing_is_left_of_it(file: Path) -> None:
    """What is replaced to take times is put back, on the client and on the workers."""
    before = {(owner, name): vars(owner)[name] for owner, name, _ in timing.timed_functions()}
    x = placed(Shard(0))
    with dtorch.profile(file):
        x + 1
        assert all(vars(owner)[name] is not now for (owner, name), now in before.items())
    assert all(vars(owner)[name] is now for (owner, name), now in before.items())
    controller = dtorch.client.runtime.current()
    assert isinstance(controller, Controller)
    assert set(controller.ask_all(dtorch.engine.protocol.TRACE, "read").values()) == {None}
    with dtorch.profile(file):
        x.exp()
    assert not [s for s in Trace(file).spans if "add" in s.name]


def test_recordings_within(file: Path) -> None:
    x = placed(Shard(0))
    with dtorch.profile(file):
        x.exp()
        with dtorch.record() as r:
            x.log()
        x.sin()
    assert [op.name for op in r.ops] == ["aten.log.default"]
    assert {"aten.exp.default", "aten.log.default", "aten.sin.default"} <= {s.name for s in Trace(file).of(1)}


def test_it_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(profiling, "LIMIT", 8)
    x = placed(Shard(0))
    with caplog.at_level(logging.WARNING, "dtorch"), dtorch.profile(file):
        for _ in range(20):
            x = x + 1
    trace = Trace(file)
    assert len(trace.of(CLIENT)) == 8
    assert trace.about["left_out_client"] > 20
    assert "left out" in caplog.text
    trace.check()


def test_a_cluster_that_ends_within(engine: str, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dtorch"), dtorch.profile(file):
        placed(Shard(0)).exp()
        dtorch.shutdown()
    assert "the client's part only" in caplog.text
    assert Trace(file).of(CLIENT)
    with pytest.raises(dtorch.errors.DTorchError, match="shut down"), dtorch.profile(file):
        pass
    dtorch.init(engine=engine)
    if engine == "processes":
        x = placed(Shard(0))
        dtorch.synchronize()
        pid = dtorch.worker_status()[torch.device("cpu", 1)].pid
        with pytest.raises(dtorch.errors.WorkerLost), dtorch.profile(file):
            (os.kill(pid, signal.SIGKILL), x.exp().to_torch())
        Trace(file)
        dtorch.shutdown()
        dtorch.init(engine=engine)
