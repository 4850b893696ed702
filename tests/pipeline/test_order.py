"""The order of issue is that of the schedule on paper: what it takes, and what each stage keeps."""

from __future__ import annotations

import functools
import gc
import itertools
from collections import Counter

import pytest
import torch

import dtorch
from dtorch import nn, pipeline

from .clock import makespan

pytestmark = pytest.mark.usefixtures("simulated")

SCHEDULES = {"gpipe": pipeline.gpipe, "1f1b": pipeline.one_f_one_b}
STAGES, MICRO_BATCHES = 4, 16
#: One of each in every stage.
FORWARD, BACKWARD = "aten.tanh.default", "aten.tanh_backward.default"


def four_stages(width: int) -> tuple[list[torch.nn.Module], list[dtorch.DeviceMesh]]:
    meshes = dtorch.init_device_mesh("cpu", STAGES, ("pp",)).unbind("pp")
    return [nn.Sequential(nn.Linear(width, width, device_mesh=mesh), nn.Tanh()) for mesh in meshes], meshes


@pytest.mark.parametrize("backward", [1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_takes_what_it_takes_on_paper(name: str, backward: int) -> None:
    """(m + p - 1)(forward + backward), whatever a backward takes: from the commands that were issued, with their meshes."""
    stages, meshes = four_stages(2)
    xs = [dtorch.ones(2, 2, device_mesh=meshes[0]) for _ in range(MICRO_BATCHES)]
    with dtorch.record() as r:
        pipeline.run(
            SCHEDULES[name](STAGES, MICRO_BATCHES), stages, xs, [None] * MICRO_BATCHES, lambda out, _: out.sum()
        )
    counts = Counter((op.name, op.meshes) for op in r.ops if op.name in (FORWARD, BACKWARD))
    assert counts == {(op, (mesh,)): MICRO_BATCHES for op in (FORWARD, BACKWARD) for mesh in meshes}
    assert sum(len(op.meshes) == 2 for op in r.ops) == 2 * (STAGES - 1) * MICRO_BATCHES
    assert makespan(r, {FORWARD: 1, BACKWARD: backward}) == (MICRO_BATCHES + STAGES - 1) * (1 + backward)


def test_a_loop_over_the_whole_model_pipelines_by_itself() -> None:
    """GPipe without a schedule: all forwards, then ``backward()`` of each loss. Waiting after each takes all stages' time for each."""
    stages, meshes = four_stages(2)
    xs = [dtorch.ones(2, 2, device_mesh=meshes[0]) for _ in range(MICRO_BATCHES)]

    def forward(x: torch.Tensor) -> torch.Tensor:
        return functools.reduce(lambda x, stage: stage(pipeline.to_stage(x, stage)), stages, x).sum()

    with dtorch.record() as r:
        losses = [forward(x) for x in xs]
    assert makespan(r, {FORWARD: 1}) == MICRO_BATCHES + STAGES - 1
    with dtorch.record() as r:
        for loss in losses:
            loss.backward()
    assert makespan(r, {BACKWARD: 1}) == MICRO_BATCHES + STAGES - 1
    with dtorch.record() as r:
        forward(xs[0]).backward()
    assert makespan(r, {FORWARD: 1, BACKWARD: 1}) == 2 * STAGES


@pytest.mark.parametrize(("p", "m"), itertools.product([1, 2, 3, 4, 7], [1, 2, 3, 5, 16]))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_complete_and_in_order(name: str, p: int, m: int) -> None:
    """Everything once, nothing before what it needs; 1F1B never has more micro-batches in flight on a stage than there are stages."""
    steps = list(SCHEDULES[name](p, m))
    at = {step: i for i, step in enumerate(steps)}
    assert len(at) == len(steps)
    assert Counter(kind for kind, _, _ in steps) == Counter(
        forward=p * m, backward=p * m, send_forward=(p - 1) * m, send_backward=(p - 1) * m
    )
    for kind, stage, i in steps:
        mine = at[pipeline.Step(kind, stage, i)]
        if kind == "forward" and stage:
            assert at["forward", stage - 1, i] < at["send_forward", stage - 1, i] < mine
        if kind == "backward":
            assert at["forward", stage, i] < mine
            if stage < p - 1:
                assert at["backward", stage + 1, i] < at["send_backward", stage + 1, i] < mine
    for stage in range(p):
        kept = itertools.accumulate(
            {"forward": 1, "backward": -1}.get(kind, 0) for kind, where, _ in steps if where == stage
        )
        assert max(kept) == (min(p - stage, m) if name == "1f1b" else m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_each_stage_keeps(name: str) -> None:
    """In memory: the input and the output of no more micro-batches than there are stages, where GPipe keeps those of all."""
    stages, meshes = four_stages(8)
    rows = 16384  # half a megabyte: what dies is freed before the next as large is made, not some commands later
    xs = [dtorch.ones(rows, 8, device_mesh=meshes[0]) for _ in range(MICRO_BATCHES)]
    gc.collect()
    before = dtorch.memory_stats(reset_peak=True)
    pipeline.run(SCHEDULES[name](STAGES, MICRO_BATCHES), stages, xs, [None] * MICRO_BATCHES, lambda out, _: out.sum())
    after = dtorch.memory_stats()
    for stage, mesh in enumerate(meshes):
        device = torch.device("cpu", mesh.device_ids[0])
        peak = (after[device]["peak"] - before[device]["live"]) / (rows * 8 * 4)
        # Of each its output, and its input, which on stage 0 is the user's.
        kept = (2 if stage else 1) * (STAGES - stage if name == "1f1b" else MICRO_BATCHES)
        # And what has come early, and the gradients at hand. The peak is the largest of samples: it may miss a little.
        assert kept - 4.5 <= peak <= kept + 4.5
