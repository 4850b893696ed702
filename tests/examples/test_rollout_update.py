"""The reinforcement learning example learns, on real workers, from a plain ``python3`` call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "rollout_update.py"


def test_the_reward_rises_and_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curve = tmp_path / "reward.png"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "40", "--plot", str(curve)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("mean reward"))
    first, last = (float(part.split()[0]) for part in line.removeprefix("mean reward: ").split(", "))
    assert first < 0.5
    assert last > 0.75
    assert curve.read_bytes().startswith(b"\x89PNG")
