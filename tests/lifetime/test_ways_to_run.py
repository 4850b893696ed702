"""A user's script works wherever Python runs it, is run once, ends with status 0 and leaves nothing behind.

Under pytest, too: see any test.
"""

from __future__ import annotations

import pytest

from .scripts import PROLOGUE, running, succeeds

# Indented blocks end with an empty line, so that the same text can be typed into a REPL.
SCRIPT = """
open("runs", "a").write("once ")
x = dtorch.ones((4, 3), device_mesh=mesh, placements=shard)
print(f"{x.sum(0)=}")
assert open("runs").read() == "once "
"""
PRINTED = (
    "x.sum(0)=tensor([4., 4., 4.], shape=(3,), dtype=torch.float32, device_mesh=DeviceMesh('cpu', [0, 1]), "
    "placements=[Partial()])\n"
)


@pytest.mark.parametrize("how", ["file", "stdin", "-c"])
def test_from_a_file_stdin_and_the_command_line(how: str) -> None:
    assert succeeds(SCRIPT, how=how) == PRINTED


def test_typed_into_an_interpreter() -> None:
    prologue = PROLOGUE.replace("def say", "\ndef say").replace("def workers", "\ndef workers") + "\n"
    with running(SCRIPT, how="-i", prologue=prologue) as script:
        status, out, err = script.finish()
        assert status == 0, err
        assert PRINTED in out
        assert "Error" not in err
        assert not script.left()


def test_the_first_use_in_a_thread_that_ends() -> None:
    out = succeeds(
        """
        import threading
        def first():
            import dtorch
            mesh = dtorch.DeviceMesh("cpu", [0, 1])
            global x
            x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])
            print((x + x).to_torch())
        for _ in range(2):
            thread = threading.Thread(target=first)
            thread.start()
            thread.join()
        print((x + 2).to_torch())
        """,
        prologue="",
    )
    assert out == "tensor([2., 2., 2., 2.])\n" * 2 + "tensor([3., 3., 3., 3.])\n"


def test_cells_in_a_thread_with_a_running_event_loop() -> None:
    """As in a notebook: the kernel's loop runs, a cell is `exec` of its text, some cells await."""
    out = succeeds(
        """
        import ast, asyncio, threading
        cells = [
            "import dtorch; mesh = dtorch.DeviceMesh('cpu', [0, 1])",
            "x = dtorch.ones(4, device_mesh=mesh, placements=[dtorch.Shard(0)])",
            "print(await (x * 3).to_torch_async())",
            "bad = x[dtorch.tensor([9], device_mesh=mesh)]",
            "try: print(await bad.to_torch_async())\\nexcept dtorch.errors.RemoteError as error: print('<cell 4>:1: bad =' in str(error))",
            "print(x)",
        ]
        async def kernel():
            names = {}
            for number, cell in enumerate(cells, 1):
                import linecache
                name = f"<cell {number}>"
                linecache.cache[name] = (len(cell), None, [cell], name)
                code = compile(cell, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                result = eval(code, names)
                if result is not None:
                    await result
        thread = threading.Thread(target=asyncio.run, args=(kernel(),))
        thread.start()
        thread.join()
        """,
        prologue="",
    )
    assert out.startswith("tensor([3., 3., 3., 3.])\nTrue\ntensor([1., 1., 1., 1.], shape=(4,)")
