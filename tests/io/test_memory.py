"""The client's memory does not grow with the model: neither by loading nor by saving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: The suite's checkpoint. The promise is made for 1 GiB: DTORCH_TEST_CHECKPOINT_MIB=1024 pytest tests/io/test_memory.py
MIB = int(os.environ.get("DTORCH_TEST_CHECKPOINT_MIB", "256"))

SCRIPT = """
import os, re, sys, torch, dtorch

def resident() -> dict[str, int]:
    found = dict(re.findall(r"(\\w+):\\s+(\\d+) kB", open("/proc/self/status").read()))
    return {name: int(found[name]) >> 10 for name in ("VmRSS", "RssAnon", "VmHWM")}

mesh = dtorch.DeviceMesh("cpu", [0, 1])
with torch.device("meta"):
    model = torch.nn.Linear(1 << 14, int(sys.argv[2]), bias=False, dtype=torch.bfloat16)
dtorch.distribute_module(model, mesh, {"weight": [dtorch.Shard(0)]})
dtorch.synchronize()
before = resident()
read = dtorch.io.load(model, sys.argv[1]).bytes_read
after_load = resident()["VmHWM"] - before["VmRSS"]
assert read == {torch.device("cpu", i): model.weight.nbytes // 2 for i in range(2)}, read
assert model.weight[-1, -1].item() == 1.5
model.weight.data[0, 0] = 2.0
dtorch.io.save(model, sys.argv[1] + ".again.safetensors")
after_save = resident()["VmHWM"] - before["VmRSS"]
print(after_load, after_save)
"""


def test_the_client_never_holds_the_weights(tmp_path: Path) -> None:
    """One sparse bfloat16 tensor, whose last element is 1.5."""
    rows = MIB * (1 << 20) // 2 >> 14
    size = rows * 2 << 14
    header = json.dumps({"weight": {"dtype": "BF16", "shape": [rows, 1 << 14], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
        file.seek(-2, os.SEEK_END)
        file.write(b"\xc0\x3f")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(rows)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    after_load, after_save = map(int, done.stdout.split())
    assert after_load < 100, f"the client grew by {after_load} MiB"
    assert after_save < 100, f"the client grew by {after_save} MiB"
    again = tmp_path / "x.safetensors.again.safetensors"
    assert again.stat().st_size - size < 200
    with again.open("rb") as file:
        file.seek(-size, os.SEEK_END)
        assert file.read(2) == b"\x00\x40"
        file.seek(-2, os.SEEK_END)
        assert file.read(2) == b"\xc0\x3f"
