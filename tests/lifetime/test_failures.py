"""An op that fails on a worker: who reads its result is told what and where; everything else goes on."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch.errors import RemoteError

from .scripts import run

SHARD, REPLICATE = [dtorch.Shard(0)], [dtorch.Replicate()]


def out_of_range(mesh: dtorch.DeviceMesh) -> tuple[dtorch.Tensor, dtorch.Tensor]:
    """A tensor and an index that is out of its range."""
    x = dtorch.ones((8, 2), device_mesh=mesh, placements=REPLICATE)
    return x, dtorch.distribute_tensor(torch.tensor([0, 1, 2, 99]), mesh, SHARD)


def test_a_dependent_read_raises_with_op_shapes_coordinate_and_line(mesh: dtorch.DeviceMesh) -> None:
    x, index = out_of_range(mesh)
    unrelated = x + 1
    bad = torch.index_select(x, 0, index)  # this line
    later = (bad * 2).sum(0)
    for read in (
        later.to_torch,
        later.to_torch_async().get,
        lambda: print(bad),
        lambda: bad.sum().item(),
        bad.local_shards,
    ):
        with pytest.raises(RemoteError) as caught:
            read()
        text = str(caught.value)
        for part in (
            "IndexError",
            "index out of range",
            "device 1, mesh coordinate (1,)",
            "(8, 2), (2,)",
            "aten.index_select.default",
            "test_failures.py:",
            "# this line",
        ):
            assert part in text, (part, text)
        assert isinstance(caught.value, IndexError)  # as on one device, so that ported code still catches it
    assert torch.equal(unrelated.to_torch(), torch.full((8, 2), 2.0))
    assert (x + 2).sum().item() == 48
    dtorch.synchronize()  # seen already


def test_out_of_memory(mesh: dtorch.DeviceMesh) -> None:
    x = dtorch.ones(4, device_mesh=mesh, placements=REPLICATE)
    huge = x.reshape(4, 1).expand(4, 1 << 44).contiguous()
    with pytest.raises(RemoteError, match=r"can't allocate memory(?s:.*)in aten.*test_failures.py"):
        huge.sum().to_torch()
    assert x.sum().item() == 4


def test_a_failed_write_poisons_every_alias_and_nothing_else(mesh: dtorch.DeviceMesh) -> None:
    x, index = out_of_range(mesh)
    row, other, copy = x[0], x.t(), x.clone()
    x.index_add_(0, index, dtorch.ones((4, 2), device_mesh=mesh))
    for alias in (x, row, other, x.detach(), x.view(-1)):
        with pytest.raises(RemoteError, match="index_add_"):
            alias.to_torch()
    assert copy.sum().item() == 16


def test_a_failure_in_backward_names_a_users_line(mesh: dtorch.DeviceMesh) -> None:
    x, index = out_of_range(mesh)
    x.requires_grad_(True)
    rows = torch.nn.functional.embedding(index, x)  # that line
    (rows * rows).sum().backward()
    with pytest.raises(RemoteError, match=r"test_failures.py:\d+: .*# that line"):
        x.grad.to_torch()


def test_synchronize_raises_the_first_unseen_failure(mesh: dtorch.DeviceMesh) -> None:
    x, index = out_of_range(mesh)
    first = torch.index_select(x, 0, index)  # first
    second = torch.index_select(x, 0, index)  # second
    third = torch.index_select(x, 0, index)  # third
    with pytest.raises(RemoteError, match="# first"):
        first.to_torch()
    with pytest.raises(RemoteError, match="# second"):
        dtorch.synchronize()
    with pytest.raises(RemoteError, match="# third"):
        dtorch.synchronize()
    dtorch.synchronize()
    with pytest.raises(RemoteError, match="# second"):
        second.to_torch()
    with pytest.raises(RemoteError, match="# third"):
        third.to_torch()


def test_sync_raises_at_the_line() -> None:
    dtorch.shutdown()
    dtorch.init(engine="processes", sync=True)
    x, index = out_of_range(dtorch.DeviceMesh("cpu", [0, 1]))
    with pytest.raises(RemoteError, match="index out of range"):
        torch.index_select(x, 0, index)
    with pytest.raises(RemoteError, match="out of bounds"):
        x.index_add_(0, index, torch.ones(4, 2))
    assert dtorch.ones(2, device_mesh=x.device_mesh).sum().item() == 2
    dtorch.shutdown()


@pytest.mark.parametrize(("end", "status"), [("", 1), ("raise OSError('of the user')", 1)])
def test_a_failure_nobody_has_seen_is_told_at_exit(end: str, status: int) -> None:
    code = f"""
        x = dtorch.ones(8, device_mesh=mesh)
        bad = torch.index_select(x, 0, dtorch.full((2,), 99, device_mesh=mesh))
        say("on")
        {end}
    """
    found, out, err = run(code)
    assert out == "on\n"
    assert "index out of range" in err, err
    assert "script.py:" in err
    assert found == status
    if "OSError" in end:
        assert "OSError: of the user" in err


@pytest.mark.parametrize(("end", "status"), [("", 1), ("dtorch.shutdown()", 0)])
def test_all_failures_that_nobody_read_are_told_in_the_end(end: str, status: int) -> None:
    """By the exit or by ``shutdown``: the first in full, the others by op and line, each once though both devices failed."""
    found, _, err = run(f"""
        x = dtorch.ones(4, 2, device_mesh=mesh)
        wrong = dtorch.distribute_tensor(torch.tensor([9, 9]), mesh, shard)
        x[wrong]
        torch.index_select(x, 0, wrong)
        x.gather(0, wrong.view(1, 2)) + 1
        while not dtorch.client.runtime.current().failures.all_unseen()[2:]: dtorch.worker_status(), x.sum().item()
        {end}
    """)
    assert found == status, err
    first, _, others = err.partition("and 2 more failed:\n")
    assert "nothing read its result" in first
    assert "aten.index.Tensor" in first
    assert "aten.index_select.default, issued at" in others
    assert "aten.gather.default" in others
    assert others.count("issued at") == 2
