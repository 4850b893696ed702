"""Large values from the workers lie where these have put them, and are as good as any plain tensor, after forks too."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import dtorch
from dtorch import memory_pool
from dtorch.client import runtime
from dtorch.engine.staging import Staging
from dtorch.worker.comm.arena import KEPT_BYTES

MIB = 1 << 20
SHAPE = (1001, 2003)  # 8 MB, uneven


@pytest.fixture(autouse=True)
def mesh() -> Iterator[dtorch.DeviceMesh]:
    dtorch.shutdown()
    memory_pool.give_back()
    dtorch.init(engine="processes")
    yield dtorch.DeviceMesh("cpu", [0, 1])
    dtorch.shutdown()


def staging() -> Staging:
    return runtime.controller().engine._staging


def placed(plain: torch.Tensor, mesh: dtorch.DeviceMesh, *placements: dtorch.Placement) -> dtorch.Tensor:
    """``plain`` on the mesh, with a result of it dead already: the next ones are lent."""
    x = dtorch.distribute_tensor(plain, mesh, placements or [dtorch.Shard(0)])
    assert torch.equal(x.to_torch(), plain)
    return x


def read(x: dtorch.Tensor) -> torch.Tensor:
    """``x`` as a plain tensor, once the workers have said that they are done with the blocks of earlier ones."""
    dtorch.synchronize()
    return x.to_torch()


def file_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def in_child(test: object) -> bool:
    """Whether ``test()`` is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if test() else 1)  # type: ignore[operator]
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextlib.contextmanager
def child_that_looks_later(test: Callable[[], bool]) -> Iterator[None]:
    """A forked child, for which ``test()`` is true at the end of the block."""
    go, gone = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(go, 1)
            os._exit(0 if test() else 1)
        finally:
            os._exit(2)
    try:
        yield
    finally:
        os.write(gone, b"!")
        status = os.waitpid(pid, 0)[1]
        os.close(go)
        os.close(gone)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("placement", [dtorch.Shard(0), dtorch.Shard(1), dtorch.Replicate()], ids=str)
def test_results_are_values_of_their_own(mesh, placement, dtype) -> None:
    plain = torch.randint(0, 2, SHAPE).to(dtype)
    x = placed(plain, mesh, placement)
    first, second = read(x), read(x)
    assert first.data_ptr() != second.data_ptr()
    assert staging()._lent
    first.zero_()
    assert torch.equal(second, plain)
    assert torch.equal(read(x), plain)
    assert not first.any()


def test_a_result_is_a_plain_tensor_in_all_else(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    result = read(x)
    assert staging()._lent
    assert result.untyped_storage().nbytes() == result.nbytes
    assert result.is_contiguous()
    assert not result.is_shared()
    assert result.storage_offset() == 0
    with io.BytesIO() as file:
        torch.save(result, file)
        assert file.tell() < result.nbytes + MIB
        file.seek(0)
        assert torch.equal(torch.load(file), plain)
    result.requires_grad_(True)
    (result * 2).sum().backward()
    assert torch.equal(result.grad, torch.full(SHAPE, 2.0))
    result = read(x).share_memory_()
    assert result.is_shared()
    assert torch.equal(result, plain)


def test_a_block_is_used_again_when_all_views_of_the_result_are_dead(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    result = read(x)
    row, array = result[7], result.numpy()[8]
    place = result.data_ptr()
    del result
    others = [read(x) for _ in range(3)]
    assert place not in [other.data_ptr() for other in others]
    assert torch.equal(row, plain[7])
    assert torch.equal(torch.from_numpy(array), plain[8])
    del row, array
    found = [read(x) for _ in range(3)]
    assert place in [one.data_ptr() for one in found]
    assert all(torch.equal(one, plain) for one in found + others)


def test_results_that_are_kept_take_no_new_shared_memory(mesh) -> None:
    """Whose pages cost more; as with those that die, there is one landing for them all."""
    plain = torch.rand(SHAPE)
    x = dtorch.distribute_tensor(plain, mesh, [dtorch.Shard(0)])
    kept = [read(x) for _ in range(10)]
    assert not staging()._lent
    assert staging()._arena._end <= 3 << 23
    assert all(torch.equal(one, plain) for one in kept)


def test_a_loop_takes_a_block_and_no_more(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    for number in range(20):
        assert torch.equal(read(x + number), plain + number)
    assert staging()._arena._end <= 3 << 23


def test_memory_goes_back_as_results_die(mesh) -> None:
    """Without another call of ours."""
    plain = torch.rand(40 * MIB)  # 160 MB, in blocks of 256
    x = placed(plain, mesh)
    fd = os.dup(runtime.controller().engine._fd)
    try:
        others = [read(x) for _ in range(4)]
        others.clear()
        results = [read(x) for _ in range(4)]
        assert all(torch.equal(result, plain) for result in results)
        assert len(staging()._lent) >= 3
        results.clear()
        dtorch.synchronize()
        gc.collect()
        workers = 2 * KEPT_BYTES  # what they may keep
        assert file_bytes(fd) <= KEPT_BYTES + workers
        assert not staging()._lent
    finally:
        os.close(fd)


def test_a_result_that_dies_inside_our_lock(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    result = read(x)
    place = result.data_ptr()
    with staging()._lock:
        del result
    found = [read(x), read(x)]
    assert place in [one.data_ptr() for one in found]
    assert all(torch.equal(one, plain) for one in found)


def test_results_that_die_in_other_threads(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    wrong = []

    def loop() -> None:
        for number in range(15):
            result = (x + number).to_torch()
            if not torch.equal(result, plain + number):
                wrong.append(number)

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_child_has_memory_of_its_own(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    first, second = read(x), read(x)
    assert len(staging()._lent) >= 1
    assert in_child(lambda: torch.equal(first.zero_() + second, plain))
    assert torch.equal(first, plain)
    assert torch.equal(second, plain)
    assert in_child(lambda: in_child(lambda: torch.equal(first.zero_() + second, plain)) and torch.equal(first, plain))
    assert torch.equal(read(x), plain)


def test_what_the_parent_does_later_is_nothing_to_a_child(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    y = x + 1
    results, other = [read(x)], read(x)
    place = results[0].data_ptr()
    assert staging()._lent
    with child_that_looks_later(lambda: torch.equal(results[0], plain) and torch.equal(other, plain)):
        other.zero_()
        results.clear()
        for _ in range(2):
            found = [read(y) for _ in range(4)]
            assert all(torch.equal(one, plain + 1) for one in found)
            places = [one.data_ptr() for one in found]
            found.clear()
        assert place in places  # the block, too, is used again


def test_a_childs_dead_results_are_not_its_parents(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    results = [read(x)]
    assert staging()._lent
    assert in_child(lambda: results.clear() is None and gc.collect() >= 0)
    assert torch.equal(results[0], plain)
    again = [read(x) for _ in range(3)]
    assert all(torch.equal(one, plain) for one in again)


def test_forks_leave_no_memory_behind(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    for _ in range(5):
        result, other = read(x), read(x)
        assert in_child(lambda result=result: torch.equal(result, plain))
        assert torch.equal(other, plain)
    assert staging()._arena._end <= 4 << 23
    assert len(staging()._lent) <= 2


def test_a_result_outlives_its_cluster_and_not_more_memory_with_it(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    big = dtorch.distribute_tensor(torch.rand(16 * MIB), mesh, [dtorch.Shard(0)])
    fd = os.dup(runtime.controller().engine._fd)
    try:
        results = [read(x), read(x)]
        lent = staging()._lent
        assert lent
        assert big.redistribute(mesh, [dtorch.Replicate()]).to_torch().numel() == 16 * MIB
        dtorch.shutdown()
        assert file_bytes(fd) <= 2 * 8 * MIB + MIB
        assert all(torch.equal(result, plain) for result in results)
        assert in_child(lambda: not results[0].zero_().any())
        assert torch.equal(results[0], plain)
        dtorch.init(engine="processes")
        other = placed(plain + 1, dtorch.DeviceMesh("cpu", [0, 1]))
        assert torch.equal(other.to_torch(), plain + 1)
        assert torch.equal(results[1], plain)
        results.clear()
        assert not lent
        assert file_bytes(fd) <= MIB
    finally:
        os.close(fd)


def test_a_kernel_that_cannot_make_pages_private(mesh, monkeypatch) -> None:
    monkeypatch.setattr("dtorch.worker.comm.arena._MADV_POPULATE_WRITE", -1)
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    results = [read(x)]
    place = results[0].data_ptr()
    assert in_child(lambda: not results[0].zero_().any())
    assert torch.equal(results[0], plain)
    with child_that_looks_later(lambda: torch.equal(results[0], plain)):
        results.clear()
        found = [read(x + 1) for _ in range(5)]
        assert place not in [one.data_ptr() for one in found]


def test_reads_go_on_after_one_that_failed(mesh) -> None:
    plain = torch.rand(SHAPE)
    x = placed(plain, mesh)
    index = dtorch.distribute_tensor(torch.tensor([1, 10**6]), mesh, [dtorch.Replicate()])
    for _ in range(3):
        with pytest.raises(dtorch.errors.RemoteError):
            (x.index_select(0, index).sum() + x).to_torch()
        assert torch.equal(read(x), plain)
    assert staging()._arena._end <= 4 << 23
