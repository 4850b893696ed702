"""Processes that a user's script starts, beside dtorch: multiprocessing, fork, data loaders."""

from __future__ import annotations

import pytest

from .scripts import succeeds


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_children_have_clusters_of_their_own(method: str) -> None:
    """Also when they import the user's module, which has no ``__main__`` guard around its tensors."""
    out = succeeds(
        f"""
        import multiprocessing
        x = dtorch.ones(4, device_mesh=mesh, placements=shard)
        def child(results):
            y = dtorch.ones(4, device_mesh=mesh, placements=shard)
            results.put((y + 1).sum().item())
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            results = context.Queue()
            process = context.Process(target=child, args=(results,))
            process.start()
            print(results.get())
            process.join()
            print(process.exitcode, x.sum().item())
        """
    )
    assert out == "8.0\n0 4.0\n"


def test_a_forked_child_cannot_use_its_parents_tensors() -> None:
    out = succeeds(
        """
        x = dtorch.ones(4, device_mesh=mesh, placements=shard)
        x.to_torch()
        if os.fork() == 0:
            for use in (lambda: x + 1, lambda: x.to_torch(), lambda: print(x), lambda: x.add_(1), lambda: x.redistribute(mesh, replicate)):
                try: use()
                except dtorch.errors.DTorchError as error: say(error)
            del x
            dtorch.synchronize()
            dtorch.shutdown()
            dtorch.shutdown()
            sys.exit(7)
        _, status = os.wait()
        say(os.waitstatus_to_exitcode(status), x.sum().item())
        """
    )
    lines = out.splitlines()
    assert len(lines) == 6
    assert all("forked" in line and "to_torch()" in line for line in lines[:5]), out
    assert lines[5] == "7 4.0"


def test_a_child_forked_while_other_threads_issue_ops() -> None:
    """No lock of ours stays held in the child."""
    out = succeeds(
        """
        x = dtorch.ones(4, device_mesh=mesh, placements=shard)
        (x + 1).to_torch()  # imports what the first op imports: a fork in the midst of an import is lost in any program
        stop = False
        def issue():
            while not stop: x + 1
        threads = [threading.Thread(target=issue) for _ in range(2)]
        for thread in threads: thread.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                try: x + 1
                except dtorch.errors.DTorchError: os._exit(5)
                os._exit(6)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        stop = True
        for thread in threads: thread.join()
        say((x + 1).sum().item())
        """
    )
    assert out == "8.0\n"


def test_a_data_loader_with_workers() -> None:
    out = succeeds(
        """
        from torch.utils.data import DataLoader, TensorDataset
        weight = dtorch.full((4,), 2., device_mesh=mesh, placements=shard)
        total = 0
        for (batch,) in DataLoader(TensorDataset(torch.arange(24.).reshape(6, 4)), 2, num_workers=2):
            total += (dtorch.distribute_tensor(batch, mesh, replicate) * weight).sum().item()
        say(total, 2 * torch.arange(24.).sum().item())
        """
    )
    assert out == "552.0 552.0\n"
