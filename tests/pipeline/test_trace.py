"""Two stages compute at the same time, as a profile shows it."""

from __future__ import annotations

from pathlib import Path

import dtorch
from benchmarks.naps import FORWARD, Nap
from dtorch import nn, pipeline

from ..observe.traces import Span, Trace

MICRO_BATCHES = 8


def test_the_stages_overlap_on_real_processes(tmp_path: Path) -> None:
    """Their layers sleep on the worker, so that no other process can keep them from it."""
    dtorch.shutdown()
    dtorch.init(engine="processes", worker_imports=["benchmarks.naps"])
    meshes = dtorch.init_device_mesh("cpu", 2, ("pp",)).unbind("pp")
    stages = []
    for mesh in meshes:
        with dtorch.default_mesh(mesh):
            stages.append(nn.Sequential(nn.Linear(4, 4), Nap()))
    xs = [dtorch.ones(2, 4, device_mesh=meshes[0]) for _ in range(MICRO_BATCHES)]

    def run(count: int) -> None:
        steps = pipeline.one_f_one_b(2, count)
        pipeline.run(steps, stages, xs[:count], [None] * count, lambda out, _: out.sum())

    run(1)  # so that everything is planned
    with dtorch.profile(tmp_path / "trace.json"):
        run(MICRO_BATCHES)
    dtorch.shutdown()
    trace = Trace(tmp_path / "trace.json")
    trace.check()
    first, second = ([s for s in trace.of(worker, "program") if is_nap(s)] for worker in (1, 2))
    assert len(first) == len(second) == 2 * MICRO_BATCHES
    assert any(overlap(a, b) for a in first for b in second)
    assert not any(overlap(a, b) for a in first for b in first if a is not b)
    # Activations come to the second stage, and gradients to the first.
    assert {s.name for worker in (1, 2) for s in trace.of(worker, "communication")} == {"transfer"}


def is_nap(span: Span) -> bool:
    """Bringing a nap its input is a program of its own."""
    return "nap" in span.name and span.stop - span.start >= FORWARD * 1e9


def overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop
