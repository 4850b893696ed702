"""A real notebook kernel: cells, `await`, Ctrl-C (the stop button), a failing cell, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from queue import Empty

import pytest
from jupyter_client.manager import KernelManager

from .scripts import ROOT, SECONDS, SOON, until


class Notebook:
    """A kernel as a notebook server runs one."""

    def __init__(self) -> None:
        self.mark = f"NOTEBOOK_TEST_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        self.directory = tempfile.TemporaryDirectory(prefix="notebook-", dir="/tmp")
        env = {**os.environ, name: value, "TMPDIR": self.directory.name, "PYTHONPATH": str(ROOT)}
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=env, cwd=self.directory.name)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def start(self, code: str) -> str:
        """Begin to run a cell."""
        return self.client.execute(code)

    def finish(self, cell: str) -> tuple[str, str]:
        """What a cell printed, its value's text included; and the name of its error."""
        printed, error = [], ""
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") != cell:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "execute_result":
                printed.append(content["data"]["text/plain"])
            elif message["msg_type"] == "error":
                error = content["ename"] + ": " + content["evalue"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(printed), error

    def run(self, code: str) -> tuple[str, str]:
        return self.finish(self.start(code))

    def processes(self) -> list[int]:
        """Its living processes, the kernel's and dtorch's."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=not self.manager.is_alive())


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    opened = Notebook()
    try:
        yield opened
    finally:
        opened.close()
    assert until(lambda: not opened.processes(), SOON), opened.processes()
    left = [name for name in os.listdir(opened.directory.name) if name.startswith("dtorch")]
    opened.directory.cleanup()
    assert not left


def test_cells(notebook: Notebook) -> None:
    assert notebook.run("import dtorch\nmesh = dtorch.DeviceMesh('cpu', [0, 1])") == ("", "")
    assert notebook.run("x = dtorch.ones((4, 3), device_mesh=mesh, placements=[dtorch.Shard(0)])") == ("", "")
    printed, error = notebook.run("x.sum(0)")
    assert not error
    assert printed.startswith("tensor([4., 4., 4.], shape=(3,)")
    assert notebook.run("(await (x * 3).to_torch_async()).sum().item()") == ("36.0", "")


def test_a_failing_op_names_its_cell_and_later_cells_work(notebook: Notebook) -> None:
    notebook.run("import dtorch, torch\nmesh = dtorch.DeviceMesh('cpu', [0, 1])")
    notebook.run(
        "bad = torch.nn.functional.embedding(dtorch.tensor([9], device_mesh=mesh), dtorch.ones(3, 2, device_mesh=mesh))"
    )
    _, error = notebook.run("print(bad)")
    assert "index out of range" in error
    assert "ipykernel" in error or "<ipython-input" in error or "In[" in error or "Cell" in error, error
    assert notebook.run("print(dtorch.ones(2, device_mesh=mesh).sum().item())") == ("2.0\n", "")


def test_the_stop_button_ends_a_wait(notebook: Notebook) -> None:
    notebook.run("import dtorch, torch\nmesh = dtorch.DeviceMesh('cpu', [0, 1])")
    notebook.run("y = dtorch.ones((1200, 1200), device_mesh=mesh)")
    cell = notebook.start("print('begun', flush=True)\nwhile True:\n    y = (y @ y) * 0\n    y.sum().item()")
    until(lambda: _begun(notebook))
    notebook.manager.interrupt_kernel()
    began = time.monotonic()
    _, error = notebook.finish(cell)
    assert error.startswith("KeyboardInterrupt")
    assert time.monotonic() - began < SECONDS
    assert notebook.run("print(dtorch.ones(2, device_mesh=mesh).sum().item())") == ("2.0\n", "")


def _begun(notebook: Notebook) -> bool:
    try:
        message = notebook.client.get_iopub_msg(timeout=1)
    except Empty:
        return False
    return message["msg_type"] == "stream" and "begun" in message["content"]["text"]


def test_a_restarted_kernel_leaves_no_workers(notebook: Notebook) -> None:
    notebook.run("import dtorch\nx = dtorch.ones(2, device_mesh=dtorch.DeviceMesh('cpu', [0, 1]))\nx.sum().item()")
    before = set(notebook.processes())
    assert len(before) >= 4  # kernel, zygote, two workers
    notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=SECONDS)
    assert until(lambda: not before & set(notebook.processes()), SOON)
    code = "import dtorch\nprint(dtorch.ones(2, device_mesh=dtorch.DeviceMesh('cpu', [0, 1])).sum().item())"
    assert notebook.run(code) == ("2.0\n", "")
