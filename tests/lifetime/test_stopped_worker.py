"""A worker that is stopped (SIGSTOP) is reported as such, not as dead, and goes on after SIGCONT."""

from __future__ import annotations

import logging
import os
import signal

import pytest
import torch

import dtorch

from .scripts import until


def test_stopped_and_continued(mesh: dtorch.DeviceMesh, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("dtorch.engine.local._PATIENCE_SECONDS", 0.5)  # 5 s otherwise
    dtorch.shutdown()
    dtorch.init(engine="processes")
    x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
    x.to_torch()
    stopped, other = torch.device("cpu", 1), torch.device("cpu", 0)
    pid = dtorch.worker_status()[stopped].pid
    assert {status.state for status in dtorch.worker_status().values()} == {"running"}
    os.kill(pid, signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, logger="dtorch"):
        future = (x + 1).to_torch_async()
        assert until(lambda: f"1 (pid {pid}), which is stopped" in caplog.text, 10)
    status = dtorch.worker_status()
    assert (status[stopped].state, status[other].state) == ("stopped", "running")
    assert status[stopped].behind > 0
    assert dtorch.is_initialized()
    os.kill(pid, signal.SIGCONT)
    assert torch.equal(future.get(), torch.full((4,), 2.0))
    assert until(lambda: {(s.state, s.behind) for s in dtorch.worker_status().values()} == {("running", 0)})
