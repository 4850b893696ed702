"""Run the benchmarks, each in a process of its own, and write benchmarks/results.md: ``python -m benchmarks [name …]``.

``python -m benchmarks --plot`` runs none: it draws docs/benchmarks.png from the results that are there.
"""

from __future__ import annotations

import datetime
import importlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from . import plot
from .measure import Row

NAMES = (
    "first_print",
    "two_layers",
    "eager",
    "receivers",
    "scaling",
    "scaling_captured",
    "plan_miss",
    "plans",
    "decode",
    "worker",
    "transfer",
    "collectives",
    "pipeline",
    "two_meshes",
    "compiled",
    "passes",
)
RESULTS = Path(__file__).with_name("results.md")


def main(names: tuple[str, ...]) -> int:
    unknown = set(names) - set(NAMES)
    if unknown:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    sections, failed = [], []
    for name in names or NAMES:
        print(f"{name} …", file=sys.stderr, flush=True)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "benchmarks", "--one", name], stdout=subprocess.PIPE
        )
        if done.returncode:
            failed.append(name)
            continue
        rows = msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])
        sections.append(_section(name, rows))
        print(sections[-1])
    if not names and not failed:
        RESULTS.write_text(_page(sections))
        print(f"wrote {RESULTS}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _section(name: str, rows: list[Row]) -> str:
    about = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
    lines = ["| | median | quartiles | bound |", "| --- | --- | --- | --- |", *map(str, rows)]
    return f"## {name}\n\n{about.strip()}\n\n" + "\n".join(lines) + "\n"


def _page(sections: list[str]) -> str:
    import os

    import torch

    where = (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    head = f"# Benchmarks\n\nWritten by `make bench` on {datetime.date.today()}: {where}. Compare ratios, not times.\n"
    return "\n".join([head, *sections])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(msgspec.to_builtins(importlib.import_module(f"benchmarks.{sys.argv[2]}").run())))
    elif sys.argv[1:] == ["--plot"]:
        plot.draw(RESULTS.read_text(), plot.PICTURE)
        print(f"wrote {plot.PICTURE}")
    else:
        sys.exit(main(tuple(sys.argv[1:])))
