"""However a script ends, nothing is left of it soon after, and its status says how it went."""

from __future__ import annotations

import pytest

from .scripts import SOON, run, running, until

BUSY = """
x = dtorch.ones((500, 500), device_mesh=mesh, placements=replicate)
big = dtorch.distribute_tensor(torch.ones(1 << 22), mesh, shard)
for _ in range(50): x = x @ x / 500
future = big.to_torch_async()
say("busy")
"""


def test_killed_while_workers_compute() -> None:
    with running(BUSY + "sys.stdin.readline()") as script:
        assert script.line() == "busy"
        assert len(script.processes()) == 4
        script.process.kill()
        script.process.wait()
        assert until(lambda: not script.left(), SOON), script.left()


def test_killed_while_a_worker_is_stopped() -> None:
    with running(BUSY + "os.kill(workers()[0], signal.SIGSTOP); say('stopped'); sys.stdin.readline()") as script:
        assert script.line() == "busy"
        assert script.line() == "stopped"
        script.process.kill()
        script.process.wait()
        assert until(lambda: not script.left(), SOON), script.left()


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("os._exit(3)", 3, ""),
        ("raise OSError('of the user')", 1, "OSError: of the user"),
        ("import atexit; atexit.register(lambda: 1 / 0)", 0, "ZeroDivisionError"),
        (
            "import atexit; atexit.register(lambda: say(x.sum().item())); threading.Thread(target=future.get, daemon=True).start()",
            0,
            "",
        ),
        (
            "future.add_done_callback(lambda f: sys.exit(9)); future.get(); time.sleep(0.2); sys.exit(4)",
            4,
            "SystemExit: 9",
        ),
        ("os.kill(workers()[0], signal.SIGSTOP); os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ],
)
def test_ends(end: str, status: int, said: str) -> None:
    found, out, err = run(BUSY + end)
    assert found == status, err
    assert said in err
    assert said or not err
    assert out.startswith("busy")


def test_other_exit_handlers_run_although_a_failure_makes_the_status() -> None:
    status, out, err = run(
        """
        x = dtorch.ones(8, device_mesh=mesh)
        bad = torch.index_select(x, 0, dtorch.full((2,), 99, device_mesh=mesh))
        """,
        prologue="import atexit; atexit.register(print, 'registered first, runs last')\n"
        + "from tests.lifetime.scripts import PROLOGUE; exec(PROLOGUE)\n",
    )
    assert (status, out) == (1, "registered first, runs last\n")
    assert err.count("index out of range") == 1


def test_two_clients_at_once() -> None:
    code = """
        for number in range(100):
            x = dtorch.full((100,), float(number + os.getpid()), device_mesh=mesh, placements=shard)
            assert (x + x).redistribute(mesh, replicate).to_torch()[99].item() == 2 * (number + os.getpid())
    """
    with running(code) as one, running(code) as other:
        assert one.finish() == (0, "", "")
        assert other.finish() == (0, "", "")
        assert until(lambda: not one.left() and not other.left(), SOON)
