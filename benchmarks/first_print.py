"""From nothing to the first printed value: the whole of examples/first.py beside ``import torch``, each in a fresh Python.

Beside it too: what PyTorch's own DTensor takes to import, and the same program for it, started by torchrun in two processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .measure import Row, ratio, rounds, row

FIRST = Path(__file__).parents[1] / "examples" / "first.py"
IMPORT_TORCH, IMPORT_DTENSOR, IMPORT, WHOLE, TORCHRUN = (
    "import torch",
    "import torch.distributed.tensor",
    "import dtorch",
    "examples/first.py",
    "the same by torchrun",
)
BY_TORCHRUN = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
x = distribute_tensor(torch.rand(4, 3), mesh, [Shard(0)])  # its own rand needs a GPU
full = x.full_tensor()
if mesh.get_rank() == 0:
    print(f"x={full}")
dist.destroy_process_group()
"""


def run() -> list[Row]:
    # As where a package is installed: compiled once. The round that is dropped compiles ours.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def python(*arguments: str) -> None:
        command = [sys.executable, *arguments]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(BY_TORCHRUN)
        script.flush()
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script.name)
        seconds = rounds(
            {
                IMPORT_TORCH: lambda: python("-c", "import torch"),
                IMPORT_DTENSOR: lambda: python("-c", "import torch.distributed.tensor"),
                IMPORT: lambda: python("-c", "import dtorch"),
                WHOLE: lambda: python(str(FIRST)),
                TORCHRUN: lambda: python(*torchrun),
            },
            calls=1,
            repeat=3,
        )
    rows = [row(name, times, 1.0, "s") for name, times in seconds.items()]
    first = seconds[WHOLE]
    rows.append(ratio("first.py over import torch", first, seconds[IMPORT_TORCH], "at most 1.35"))
    rows.append(ratio("first.py over import torch.distributed.tensor", first, seconds[IMPORT_DTENSOR], "at most 1.25"))
    rows.append(ratio("torchrun over first.py", seconds[TORCHRUN], first, "at least 2"))
    return rows
