"""Workers keep freed memory, up to a limit; in a process of its own, for it changes how the process allocates."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
from dtorch.worker import memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

memory.keep_freed()
kept = torch.ones(100_000_000, dtype=torch.uint8)
place = kept.data_ptr()
above = torch.ones(1000)
before = resident()
del kept
assert resident() > before - 50_000_000
again = torch.empty(99_000_000, dtype=torch.uint8)
assert place <= again.data_ptr() < place + 100_000_000
memory.trim()
assert resident() > before - 50_000_000
memory.KEPT_BYTES = 50_000_000
del again
memory.trim()
assert resident() < before - 50_000_000
"""


def test_freed_memory_is_used_again_and_given_back_beyond_a_limit() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
