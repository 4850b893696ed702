"""The engine of real processes: commands come through, failures come home, nothing is left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dtorch.engine import local, protocol
from dtorch.engine.channel import ClientChannel
from dtorch.errors import DeviceUnavailable, DTorchError, WorkerLost
from dtorch.placement import PARTIAL, shard
from dtorch.placement import REPLICATE as R
from dtorch.raw import dtype_name

from .cluster import Cluster, children, gone, running, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="worker processes need Linux")

LOST_SECONDS = 2.0
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running() as made:
        yield made


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def test_put_run_get(cluster: Cluster) -> None:
    mesh = cluster.mesh(0, 1)
    x = rand(5, 3)
    a = cluster.put(x, mesh, [shard(0)])
    b = cluster.op("aten.add.Tensor", mesh, a, a)
    assert torch.equal(cluster.get(b, mesh, [shard(0)], x.shape), x + x)
    token = cluster.token()
    cluster.send([protocol.FREE, a], [protocol.STATS, token, False])
    stats = cluster.replies(token, 2)
    assert [stats[device]["values"] for device in (0, 1)] == [1, 1]
    assert sum(stats[device]["live"] for device in (0, 1)) == x.nbytes
    cluster.sync(2)
    cluster.engine.wait_behind(0)
    assert cluster.engine.behind() == 0


def test_transfers_between_and_within_meshes(cluster: Cluster) -> None:
    pair, line, square = cluster.mesh(0, 1), cluster.mesh(2, 0, 1), cluster.mesh([0, 1], [2, 3])
    x = rand(7, 6)
    for source, before, target, after in [
        (pair, [shard(0)], pair, [R]),
        (pair, [shard(0)], pair, [shard(1)]),
        (pair, [PARTIAL], pair, [shard(1)]),
        (square, [shard(0), shard(1)], square, [R, shard(0)]),
        (square, [PARTIAL, R], line, [shard(0)]),
        (pair, [shard(1)], square, [shard(1), shard(0)]),
    ]:
        value = cluster.put(x, source, before)
        moved = cluster.reshard(value, x.shape, (source, before), (target, after))
        assert torch.equal(cluster.get(moved, target, after, x.shape), x), (source, before, target, after)


def test_later_meshes_start_more_workers(cluster: Cluster) -> None:
    first = cluster.mesh(0)
    x = rand(4)
    value = cluster.put(x, first, [shard(0)])
    cluster.mesh(1, 2)
    both = cluster.mesh(0, 1, 2)
    moved = cluster.reshard(value, x.shape, (first, [shard(0)]), (both, [shard(0)]))
    assert torch.equal(cluster.get(moved, both, [shard(0)], x.shape), x)
    assert sorted(cluster.engine.pids) == [0, 1, 2]


def test_large_tensors_go_through_shared_memory(cluster: Cluster) -> None:
    mesh = cluster.mesh(0, 1)
    x = rand(1000, 2003)
    for _ in range(3):
        value = cluster.put(x, mesh, [shard(1)], stage=True)
        landing = cluster.engine.landing(x.nbytes)
        token = cluster.token()
        cluster.send(
            [protocol.GET, token, value, cluster.meshes[mesh], [1], list(x.shape), dtype_name(x.dtype), landing]
        )
        assert cluster.replies(token, 2) == {0: None, 1: None}
        assert torch.equal(cluster.engine.landed(landing, x.shape, x.dtype), x)
        cluster.engine.wait_behind(0)
    # Two blocks of 8 MiB, used again and again.
    assert cluster.engine._staging._arena._end == 2 << 23


def test_wait_behind_is_woken_by_progress_and_by_ctrl_c(cluster: Cluster) -> None:
    mesh = cluster.mesh(0)
    pid = cluster.engine.pids[0]
    os.kill(pid, signal.SIGSTOP)
    cluster.put(rand(2), mesh, [shard(0)])
    assert cluster.engine.behind() >= 1
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        cluster.engine.wait_behind(0)
    os.kill(pid, signal.SIGCONT)
    cluster.engine.wait_behind(0)
    assert cluster.engine.behind() == 0
    cluster.sync(1)


def test_ctrl_c_is_the_clients_alone(cluster: Cluster) -> None:
    mesh = cluster.mesh(0, 1)
    family = [cluster.engine._zygote.process.pid, *cluster.engine.pids.values()]
    assert all(os.getpgid(pid) != os.getpgid(0) for pid in family)
    for pid in family:
        os.kill(pid, signal.SIGINT)
    x = rand(3)
    assert torch.equal(cluster.get(cluster.put(x, mesh, [shard(0)]), mesh, [shard(0)], x.shape), x)


def test_devices_that_do_not_exist(cluster: Cluster) -> None:
    with pytest.raises(DeviceUnavailable, match=r"limit of 64 workers; dtorch.init\(devices=65\)"):
        cluster.engine.ensure("cpu", [0, 64])
    if not torch.cuda.is_available():
        with pytest.raises(DeviceUnavailable, match=r"cuda.*is_available"):
            cluster.engine.ensure("cuda", [0])


# Failures


def test_a_failed_op_poisons_what_depends_on_it_through_a_collective(cluster: Cluster) -> None:
    mesh = cluster.mesh(0, 1)
    x, index = rand(4), torch.tensor([0, 1, 0, 9])  # the index is out of range on device 1 only
    a, i = cluster.put(x, mesh, [R]), cluster.put(index, mesh, [shard(0)])
    bad = cluster.op("aten.take.default", mesh, a, i)
    failed = cluster.sequence - 1
    moved = cluster.reshard(bad, [4], (mesh, [shard(0)]), (mesh, [R]))
    with pytest.raises(RuntimeError, match=rf"poisoned by \(1, {failed}\)"):
        cluster.get(moved, mesh, [R], [4])
    assert torch.equal(cluster.get(a, mesh, [R], [4]), x)
    good = cluster.reshard(cluster.op("aten.add.Tensor", mesh, a, a), [4], (mesh, [PARTIAL]), (mesh, [R]))
    assert torch.equal(cluster.get(good, mesh, [R], [4]), 4 * x)


def lose(cluster: Cluster, pid: int) -> WorkerLost:
    os.kill(pid, signal.SIGKILL)
    error = cluster.lost.get(timeout=LOST_SECONDS)
    assert isinstance(error, WorkerLost)
    with pytest.raises(WorkerLost):
        cluster.send([protocol.SYNC, 1])
    with pytest.raises(WorkerLost):
        cluster.engine.ensure("cpu", [0])
    cluster.engine.wait_behind(0)  # returns
    pids = [*cluster.engine.pids.values()]
    cluster.engine.close()
    assert gone(pids)
    return error


def test_a_worker_killed_while_idle(cluster: Cluster) -> None:
    cluster.mesh(0, 1)
    pid = cluster.engine.pids[1]
    assert f"worker 1 (pid {pid}) was killed by signal 9 (SIGKILL)" in str(lose(cluster, pid))
    with running() as another:
        mesh = another.mesh(0, 1)
        x = rand(3)
        assert torch.equal(another.get(another.put(x, mesh, [shard(0)]), mesh, [shard(0)], x.shape), x)


def test_a_worker_killed_while_computing(cluster: Cluster) -> None:
    mesh = cluster.mesh(0, 1)
    x = cluster.put(rand(2000, 2000), mesh, [R], stage=True)
    for _ in range(50):
        x = cluster.op("aten.mm.default", mesh, x, x)
    time.sleep(0.2)
    assert cluster.engine.behind() > 0
    lose(cluster, cluster.engine.pids[0])


def test_a_worker_killed_inside_a_collective(cluster: Cluster) -> None:
    mesh = cluster.mesh(0, 1, 2)
    x = cluster.put(rand(4), mesh, [PARTIAL])
    cluster.sync(3)
    os.kill(cluster.engine.pids[2], signal.SIGSTOP)  # so that the others wait in it
    cluster.reshard(x, [4], (mesh, [PARTIAL]), (mesh, [R]))
    time.sleep(0.2)
    lose(cluster, cluster.engine.pids[2])


def test_a_worker_killed_during_a_large_transfer(cluster: Cluster) -> None:
    mesh = cluster.mesh(0, 1)
    big = rand(30_000_000)
    value = cluster.put(big, mesh, [shard(0)], stage=True)
    for _ in range(20):
        cluster.reshard(value, big.shape, (mesh, [shard(0)]), (mesh, [R]))
    time.sleep(0.1)
    lose(cluster, cluster.engine.pids[1])


def test_a_waiting_client_learns_of_a_death(cluster: Cluster) -> None:
    cluster.mesh(0, 1)
    pid = cluster.engine.pids[0]
    os.kill(pid, signal.SIGSTOP)
    cluster.send([protocol.SYNC, 1])
    timer = threading.Timer(0.2, os.kill, [pid, signal.SIGKILL])
    timer.start()
    start = time.monotonic()
    cluster.engine.wait_behind(0)
    assert time.monotonic() - start < 0.2 + LOST_SECONDS
    assert cluster.lost.get(timeout=LOST_SECONDS)


def test_the_zygote_killed(cluster: Cluster) -> None:
    cluster.mesh(0, 1)
    pids = [*cluster.engine.pids.values()]
    os.kill(cluster.engine._zygote.process.pid, signal.SIGKILL)
    assert "starts workers" in str(cluster.lost.get(timeout=LOST_SECONDS))
    assert until(lambda: gone(pids), LOST_SECONDS)
    directory = cluster.engine._directory
    assert os.path.exists(directory)
    cluster.engine.close()
    assert not os.path.exists(directory)


def test_a_stopped_worker_is_unresponsive_not_dead(cluster: Cluster, monkeypatch, caplog) -> None:
    monkeypatch.setattr("dtorch.engine.local._PATIENCE_SECONDS", 0.2)
    cluster.mesh(0, 1)
    pid = cluster.engine.pids[1]
    os.kill(pid, signal.SIGSTOP)
    assert until(lambda: cluster.engine.unresponsive() == [1], 5)
    with caplog.at_level(logging.WARNING, logger="dtorch"):
        cluster.send([protocol.SYNC, 7])
        assert until(lambda: "which is stopped" in caplog.text, 5)
    assert cluster.lost.empty()
    os.kill(pid, signal.SIGCONT)
    assert len(cluster.replies(7, 2)) == 2
    assert cluster.engine.unresponsive() == []


def test_a_module_that_cannot_be_imported_says_so() -> None:
    with running(worker_imports=["no_such_module_anywhere"]) as cluster:
        with pytest.raises(WorkerLost, match="No module named 'no_such_module_anywhere'"):
            cluster.mesh(0, 1)
        assert "exited with status 1" in str(cluster.lost.get(timeout=LOST_SECONDS))


# Scripts: what needs a client process of its own


def start(code: str, **options) -> subprocess.Popen:
    """Run ``code`` in a new interpreter, with the repository and `Cluster` at hand."""
    prologue = """
        import os, signal, sys, threading, time, torch
        from dtorch.engine import protocol
        from dtorch.placement import *
        from tests.engine.cluster import *
        def say(*words): print(*words, flush=True)
    """
    text = textwrap.dedent(prologue) + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    try:
        return process.communicate(timeout=60)
    finally:
        process.kill()


@pytest.mark.parametrize(
    "end",
    ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)", "sys.exit(4)", "cluster.engine.close(); raise OSError"],
)
def test_nothing_is_left_when_the_client_ends(end: str) -> None:
    process = start(f"""
        cluster = Cluster()
        mesh = cluster.mesh(0, 1)
        cluster.put(torch.rand(10_000_000), mesh, [REPLICATE], stage=True)
        say(cluster.engine._directory)
        sys.stdin.readline()
        {end}
    """, stdin=subprocess.PIPE)  # fmt: skip
    directory = process.stdout.readline().strip()
    assert os.stat(directory).st_mode & 0o777 == 0o700
    pids = list(children(process.pid))
    assert len(pids) == 3
    process.stdin.write("go\n")
    process.stdin.flush()
    process.wait(10)
    assert process.returncode != 0
    assert until(lambda: gone(pids), LOST_SECONDS)
    assert until(lambda: not os.path.exists(directory), LOST_SECONDS)
    finish(process)


def test_a_client_killed_while_the_zygote_imports_torch() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import dtorch"], cwd=ROOT)
    assert until(lambda: list(children(process.pid)), 10, step=0.001)
    pids = list(children(process.pid))
    time.sleep(0.2)
    process.kill()
    process.wait()
    assert until(lambda: gone(pids), LOST_SECONDS)


def test_close_leaves_no_process_file_or_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        with running() as cluster:
            mesh = cluster.mesh(0, 1)
            cluster.put(rand(100), mesh, [shard(0)], stage=True)
            cluster.sync(2)
            pids.extend(cluster.engine.pids.values())
            directory = cluster.engine._directory
            threading.Thread(target=cluster.engine.close).start()
            cluster.engine.close()
            cluster.engine.close()
            with pytest.raises(DTorchError, match="shut down"):
                cluster.engine.send([])
        assert not os.path.exists(directory)

    pids: list[int] = []
    once()
    count = descriptors()
    once()
    assert until(lambda: descriptors() <= count, 2)
    assert until(lambda: gone(pids), 2)


def test_a_noisy_worker_blocks_nobody_and_its_last_lines_are_told(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text("""
import sys, threading
def shout():
    while True:
        sys.stderr.write("noise " * 1000 + "\\n")
threading.Thread(target=shout, daemon=True).start()
""")
    # The client's stderr is a pipe that nobody reads.
    process = start(f"""
        sys.path.append({str(tmp_path)!r})
        cluster = Cluster(worker_imports=["noisy"])
        mesh = cluster.mesh(0, 1)
        x = torch.rand(1000)
        for _ in range(50):
            assert torch.equal(cluster.get(cluster.put(x, mesh, [shard(0)]), mesh, [shard(0)], x.shape), x)
        time.sleep(0.5)
        os.kill(cluster.engine.pids[1], signal.SIGKILL)
        error = str(cluster.lost.get(timeout=2))
        say("noise noise noise" in error, len(error.splitlines()) <= 21)
        cluster.engine.close()
    """)  # fmt: skip
    assert process.stdout.read() == "True True\n"
    finish(process)


def test_what_workers_print_reaches_the_clients_stderr(tmp_path: Path) -> None:
    (tmp_path / "talking.py").write_text("print('hello from a worker')")
    process = start(f"""
        sys.path.append({str(tmp_path)!r})
        with running(worker_imports=["talking"]) as cluster:
            cluster.mesh(0)
    """)
    out, err = finish(process)
    assert (out, err) == ("", "hello from a worker\n")


def test_two_clients_at_once() -> None:
    code = """
        cluster = Cluster()
        mesh = cluster.mesh(0, 1)
        for number in range(50):
            x = torch.full((100,), float(number + os.getpid()))
            assert torch.equal(cluster.get(cluster.put(x, mesh, [shard(0)]), mesh, [shard(0)], x.shape), x)
        say("right")
    """
    processes = [start(code), start(code)]
    for process in processes:
        out, err = finish(process)
        assert (out, err, process.returncode) == ("right\n", "", 0)


def test_a_forked_child_gets_a_clear_error_and_harms_nobody() -> None:
    process = start("""
        cluster = Cluster()
        mesh = cluster.mesh(0, 1)
        x = torch.rand(6)
        value = cluster.put(x, mesh, [shard(0)])
        pid = os.fork()
        if pid == 0:
            try:
                cluster.send([protocol.SYNC, 1])
            except Exception as error:
                say(type(error).__name__, error)
            cluster.engine.close()
            sys.exit(0)
        os.waitpid(pid, 0)
        assert torch.equal(cluster.get(value, mesh, [shard(0)], x.shape), x)
        orphan = os.fork()
        if orphan == 0:
            time.sleep(30)
            os._exit(0)
        say(orphan)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    line = process.stdout.readline()
    assert "a forked process cannot use dtorch tensors of its parent" in line, (line, process.communicate())
    orphan = int(process.stdout.readline())
    pids = [pid for pid in children(process.pid) if pid != orphan]
    process.wait(10)
    # The child that lives on does not keep the workers.
    assert until(lambda: gone(pids), LOST_SECONDS)
    os.kill(orphan, signal.SIGKILL)
    finish(process)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_children_start_no_zygote(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from dtorch.engine import zygote
import multiprocessing
def child():
    print(zygote._spare is None, flush=True)
if __name__ == "__main__":
    print(zygote._spare is None, flush=True)
    process = multiprocessing.get_context({method!r}).Process(target=child)
    process.start(); process.join()
""")
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("False\nTrue\n", "")


def test_simulation_starts_no_zygote() -> None:
    code = "from dtorch.engine import zygote; print(zygote._spare)"
    environment = {**os.environ, "DTORCH_ENGINE": "simulate"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout == "None\n"


def test_a_socket_path_in_use_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The directory is a fresh one of the engine's own; what may still be in the way is told, and nothing is left behind."""
    made = []

    def taken(address: str) -> ClientChannel:
        made.append(Path(address))
        (made[0] / "events" / "somebody").mkdir(parents=True)
        return ClientChannel(address)

    monkeypatch.setattr(local, "ClientChannel", taken)
    engine = local.LocalEngine(print, print, devices=2)
    with pytest.raises(DTorchError, match=r"the socket ipc://.*/events cannot be opened"):
        engine.ensure("cpu", [0])
    engine.close()
    assert not made[0].exists()
