"""The command line: ``python -m tests.conformance --help``."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

from . import supervise
from .ops import CHECKS
from .outcome import Tally
from .placements import MESHES, VARIANTS


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="Run PyTorch's own op, module and optimizer databases on dtorch and compare with plain torch.",
        epilog="Lists are separated by commas. Random ops are compared bit for bit (dtorch's random='torch'), or with "
        "--random keyed by shape and dtype only.",
    )
    made.add_argument("--engine", default="simulate", help="simulate, processes, or the stand-ins plain and faulty")
    made.add_argument("--random", default="torch", choices=("torch", "keyed"))
    made.add_argument("--ops", default="*", help="names or shell patterns: add,mm,nn.Linear,optim.Adam*,linalg*")
    made.add_argument("--mesh", default=",".join(MESHES), help=f"of {', '.join(MESHES)}")
    made.add_argument("--placements", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    made.add_argument("--checks", default=",".join(CHECKS), help=f"of {', '.join(CHECKS)}")
    made.add_argument("--dtypes", default="", help="beside the first: bfloat16,float16,complex64,int64,bool, or all")
    made.add_argument("--sample-limit", type=int, default=4, help="samples of an op (a further dtype gets one)")
    made.add_argument("--slice", default="0/1", help="part/parts of the names, from 0")
    made.add_argument("--json", type=Path, help="append one line of results for every finished name")
    made.add_argument("--resume", action="store_true", help="skip the names that --json holds already")
    made.add_argument(
        "--jobs", type=int, default=0, help="run in that many supervised processes, which survive crashes"
    )
    made.add_argument("--strides", action="store_true", help="compare strides too")
    made.add_argument("--trace", action="store_true", help="print the traceback of everything that raises")
    made.add_argument("--quiet", action="store_true", help="no live line and no table")
    return made


def split(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    """A comma-separated list, each item of which is allowed."""
    items = tuple(item for item in text.split(",") if item)
    unknown = [item for item in items if item not in allowed]
    if unknown:
        raise SystemExit(f"{option}: {', '.join(unknown)} is not among {', '.join(allowed)}")
    return items


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    if options.jobs:
        if options.json is None:
            raise SystemExit("--jobs needs --json, through which the processes report")
        tally = supervise.run(options.jobs, options.json, options.resume, arguments)
    else:
        tally = run(options)
    if not options.quiet:
        print(tally.table())
    total = tally.total()
    return 1 if total["wrong"] or total["raised"] or not total else 0


def run(options: argparse.Namespace) -> Tally:
    """Run what ``options`` select in this process."""
    warnings.simplefilter("ignore")  # the databases call deprecated things on purpose
    from . import adapters, databases
    from .checks import Grid

    grid = Grid(
        split(options.mesh, tuple(MESHES), "--mesh"),
        split(options.placements, VARIANTS, "--placements"),
        split(options.checks, CHECKS, "--checks"),
        options.sample_limit,
        tuple(options.dtypes.split(",")),
        options.strides,
        options.trace,
    )
    part, parts = map(int, options.slice.split("/"))
    selected = databases.select(tuple(options.ops.split(",")), part, parts)
    tally = Tally()
    done = tally.load(options.json) if options.json and options.resume else set()
    adapter = adapters.make(options.engine, options.random)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    live_line = not options.quiet and sys.stderr.isatty()
    for position, entry in enumerate(selected):
        if entry.name in done:
            continue
        if live_line:
            live = f"{position + 1}/{len(selected)} {tally.passed():6.2f} % {time.monotonic() - started:5.0f} s  {entry.name}"
            print(f"\r{live:100.100}", end="", file=sys.stderr, flush=True)
        write(options.json, {"started": entry.name})
        tally.add(entry.run(adapter, grid))
        write(options.json, tally.record(entry.name))
    write(options.json, {"finished": True})
    if live_line:
        print(f"\r{'':100}\r", end="", file=sys.stderr)
    return tally


def write(path: Path | None, record: dict) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
