"""From nothing to the first printed value: the whole of examples/first.py beside ``import torch``, each in a fresh Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .measure import Row, ratio, rounds, row

FIRST = Path(__file__).parents[1] / "examples" / "first.py"


def run() -> list[Row]:
    def python(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    seconds = rounds(
        {
            "import torch": lambda: python("-c", "import torch"),
            "import dtorch": lambda: python("-c", "import dtorch"),
            "examples/first.py": lambda: python(str(FIRST)),
        },
        calls=1,
        repeat=9,
    )
    rows = [row(name, times, 1.0, "s") for name, times in seconds.items()]
    rows.append(
        ratio("first.py over import torch", seconds["examples/first.py"], seconds["import torch"], "little more than 1")
    )
    return rows
