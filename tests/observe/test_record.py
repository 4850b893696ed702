"""`record` names every op and everything it communicates, with the user's line."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard
from dtorch.observe import tables, timing

pytestmark = pytest.mark.usefixtures("engine")

MESH = DeviceMesh("cpu", [0, 1], ("tp",))
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))


def placed(*placements: dtorch.Placement, mesh: DeviceMesh = MESH, shape: tuple[int, ...] = (4, 6)) -> dtorch.Tensor:
    return dtorch.ones(shape, device_mesh=mesh, placements=list(placements))


def test_ops_are_listed_in_order_with_their_lines() -> None:
    x = placed(Shard(0))
    with dtorch.record() as r:
        y = x + x
        y.sum()
    assert [op.name for op in r.ops] == ["aten.add.Tensor", "aten.sum.default"]
    assert r.ops[0].line.startswith(__file__)
    assert r.ops[0].line.endswith("y = x + x")
    assert r.communication == []
    x * 2
    assert len(r.ops) == 2  # the recording has ended


@pytest.mark.parametrize(
    ("source", "target", "kind", "nbytes"),
    [
        (Shard(0), Replicate(), "all_gather", 48),
        (Shard(0), Shard(1), "all_to_all", 24),
        (Partial(), Shard(0), "reduce_scatter", 48),
        (Partial(), Replicate(), "all_reduce", 96),
    ],
)
def test_what_is_asked_for(source: dtorch.Placement, target: dtorch.Placement, kind: str, nbytes: int) -> None:
    """Of 4 x 6 floats, half a tensor is 48 bytes; an all-reduce of so few is one exchange of everything."""
    x = placed(source)
    with dtorch.record() as r:
        x.redistribute(placements=[target])
    (one,) = r.communication
    assert (one.kind, one.nbytes, one.total_bytes, one.axes, one.shape) == (kind, nbytes, 2 * nbytes, ("tp",), (4, 6))
    assert one.asked_for
    assert "x.redistribute(placements=[target])" in one.line


def test_the_meshes_that_run_an_op() -> None:
    other = DeviceMesh("cpu", [1, 2], ("tp",))
    x = placed(Shard(0))
    with dtorch.record() as r:
        x.redistribute(other, [Shard(0)]).exp()
    assert [op.meshes for op in r.ops] == [(MESH, other), (other,)]


def test_cuts_of_replicas_are_no_communication() -> None:
    x = placed(Replicate())
    with dtorch.record() as r:
        x.redistribute(placements=[Shard(0)])
    assert r.communication == []


def test_what_dtorch_inserts() -> None:
    x = placed(Shard(1))
    with dtorch.record() as r:
        x.softmax(1)
    (one,) = r.communication
    assert (one.kind, one.op, one.asked_for) == ("all_gather", "aten._softmax.default", False)
    assert "x.softmax(1)" in one.line


def test_axes_of_a_grid_and_transfers_between_meshes() -> None:
    x = placed(Shard(0), Shard(1), mesh=GRID)
    with dtorch.record() as r:
        x.redistribute(placements=[Shard(0), Replicate()])
        x.redistribute(MESH, [Replicate()])
    assert [(one.kind, one.axes) for one in r.communication] == [("all_gather", ("tp",)), ("transfer", ())]
    assert r.communication[1].target_mesh == MESH


def test_backward_names_the_forward_line() -> None:
    x, w = placed(Shard(0)).requires_grad_(), placed(Shard(0), shape=(6, 6)).requires_grad_()
    with dtorch.record() as r:
        y = x @ w
        y.pow(2).sum().backward()
    multiplied = [one.line for one in r.communication if one.op == "aten.mm.default"]
    assert len(multiplied) > 1
    assert all(line.endswith("y = x @ w") for line in multiplied)
    gradients = [one.line for one in r.communication if one.op == "gradient"]
    assert gradients
    assert all("backward()" in line for line in gradients)


def test_fallbacks() -> None:
    x = placed(Shard(0))
    with dtorch.record() as r:
        torch.nonzero(x)
    (one,) = r.fallbacks
    assert one.name == "aten.nonzero.default"
    assert one.inputs == (((4, 6), (Shard(0),)),)
    assert "torch.nonzero(x)" in one.line


def test_writes_through_views_of_copies_are_seen() -> None:
    x = placed(Shard(1))
    view = x.reshape(24)
    with dtorch.record() as r:
        view.add_(1)
    assert torch.equal(x.to_torch(), torch.full((4, 6), 2.0))
    assert r.communication


def test_summary_groups_by_line() -> None:
    with dtorch.record() as r:
        for _ in range(3):
            placed(Shard(1)).softmax(1)
    lines = r.summary().partition("\n\n")[2].splitlines()
    assert lines[0].split() == ["count", "kind", "axes", "bytes", "op", "line"]
    assert lines[2].split()[:5] == ["3", "all_gather", "tp", "144", "inserted"]
    assert lines[-1].startswith("9 ops; 3 redistributions (3 inserted), 144 bytes")


def test_recordings_nest() -> None:
    x = placed(Shard(0))
    with dtorch.record() as outer:
        x + 1
        with dtorch.record() as inner:
            x + 1
    assert (len(outer.ops), len(inner.ops)) == (2, 1)


def test_a_recording_that_outlives_a_cluster(engine: str) -> None:
    """The next cluster numbers its programs anew."""
    with dtorch.record() as r:
        x = placed(Shard(0), shape=(4, 4))
        y = x + 1
        y * 2
        dtorch.shutdown()
        dtorch.init(engine=engine)
        x = placed(Shard(0), shape=(4, 4))
        x.redistribute(placements=[Replicate()])
        with dtorch.record() as second:
            x.softmax(0)
    assert [one.kind for one in r.communication] == ["all_gather", second.communication[0].kind]


def test_summary_has_times(engine: str) -> None:
    """Of each op and line, in Python and on the worker that it took longest; what sends nothing is told apart."""
    x = placed(Shard(1))
    with dtorch.record() as r:
        for _ in range(3):
            x.softmax(1)
        x.detach()
        during = r.summary().splitlines()
    assert during[2].split()[2:4] == ["-", "-"]  # the workers are asked in the end
    lines = r.summary().partition("\n\n")[0].splitlines()
    assert lines[0].split() == ["count", "client", "ms", "worker", "ms", "moving", "ms", "bytes", "op", "line"]
    (row,) = [line.split(maxsplit=6) for line in lines[2:] if "softmax" in line]
    count, *times, nbytes, op, line = row
    assert (count, nbytes, op) == ("4", "48", "aten._softmax.default")  # one more that moved it, and kept the copy
    client, worker, moving = map(float, times)
    assert client > 0
    assert worker >= moving >= 0
    assert line.endswith("x.softmax(1)")
    assert lines[-1].startswith("1 calls sent the workers nothing")


def test_the_time_of_a_call_is_shared_by_what_it_issues() -> None:
    def issue(at: int, call: timing.Call | None) -> timing.Issue:
        return timing.Issue(at, 0, "", [], None, None, call)  # type: ignore[arg-type]

    one, other = (timing.Call("op", None, None, 0, start, start + 100) for start in (0, 1000))
    silent = timing.Call(torch.ops.aten.detach.default, None, None, 0, 2000, 2007)
    issues = [issue(30, one), issue(1040, other), issue(70, one), issue(5, None)]
    each, others = tables.client_time(issues, [one, other, silent])
    assert each == [30, 100, 70, 0]
    assert (others.count, others.client) == (1, 7)


def test_many_rows_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "LISTED", 2)
    x = placed(Shard(0))
    with dtorch.record() as r:
        for op in ("exp", "log", "sin", "cos", "tan"):
            getattr(x, op)()
    lines = r.summary().partition("\n\n")[0].splitlines()
    assert len(lines) == 2 + 2 + 1
    assert lines[-1].split()[0] == "3"
    assert lines[-1].endswith("3 more")


def test_a_summary_after_the_cluster_ended(engine: str) -> None:
    with dtorch.record() as r:
        placed(Shard(0)).exp()
        dtorch.shutdown()
    assert "aten.exp.default" in r.summary()
    dtorch.init(engine=engine)
