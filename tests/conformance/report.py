"""Failures grouped by what went wrong: ``python -m tests.conformance.report build/conformance.jsonl``."""

from __future__ import annotations

import collections
import re
import subprocess
import sys
from pathlib import Path

from .outcome import Outcome, Tally


def groups(failures: list[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """The most frequent kinds first; numbers and addresses do not make kinds differ."""
    found: dict[str, list[Outcome]] = collections.defaultdict(list)
    for failure in failures:
        if failure.status == "raised":
            found[f"raised {re.sub(r'0x[0-9a-f]+|[0-9]+(?:[.][0-9]+)?', '#', failure.detail)[:110]}"].append(failure)
        else:
            found[f"{failure.status} {failure.check}"].append(failure)
    order = {"wrong": 0, "raised": 1, "inexact": 2}
    return sorted(found.items(), key=lambda item: (order[item[0].split()[0]], -len(item[1])))


def command(failure: Outcome) -> str:
    """What runs this failure alone."""
    checks = {"train": "backward", "eval": "no_grad"}.get(failure.check, failure.check)
    checks = "backward" if failure.name.startswith("optim.") else checks
    text = f"python -m tests.conformance --ops '{failure.name}' --mesh {failure.mesh} --placements {failure.variant} --checks {checks}"
    return text + (" --dtypes all" if failure.dtype != "float32" else "") + f" --sample-limit {failure.sample + 1}"


def trace(failure: Outcome) -> str:
    """The end of the traceback of this failure, run again; "" if it passes now."""
    arguments = [sys.executable, "-W", "ignore", *command(failure).replace("'", "").split()[1:], "--trace", "--quiet"]
    output = subprocess.run(arguments, capture_output=True, text=True, timeout=120).stdout
    first = output.split("\n--- ")[0].strip().splitlines()
    return "\n".join(f"    {line}" for line in [*first[:1], *first[1:][-9:]])


def main(path: str, traced: str = "12") -> None:
    tally = Tally()
    tally.load(Path(path))
    total = tally.total()
    print(f"{tally.passed():.2f} % of {sum(total.values())} comparisons hold: {dict(total)}\n")
    for number, (kind, failures) in enumerate(groups(tally.failures)):
        names = sorted({failure.name for failure in failures})
        print(f"{len(failures)} × {kind}")
        print(f"    {len(names)} names: {', '.join(names[:25])}{' …' if len(names) > 25 else ''}")
        print(f"    {failures[0].where()}: {failures[0].detail}")
        print(f"    {command(failures[0])}")
        if number < int(traced) and failures[0].status == "raised":
            print(trace(failures[0]))
        print(flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
