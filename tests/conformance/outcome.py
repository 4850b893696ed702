"""What one comparison came to, and how many came to what."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

STATUSES = ("ok", "inexact", "wrong", "raised", "skipped")
"""``inexact``: close, though nothing was split. ``skipped``: plain torch itself raises, or gives different values each time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One check of one sample of ``name`` (an op, module or optimizer) on one mesh under one layout."""

    name: str
    status: str
    check: str
    dtype: str = ""
    sample: int = 0
    mesh: str = ""
    variant: str = ""
    detail: str = ""

    def where(self) -> str:
        return f"{self.name} {self.check} {self.dtype} sample {self.sample} mesh {self.mesh} {self.variant}"


class Tally:
    """Counts of outcomes per name; keeps those that are neither ok nor skipped."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter[str]] = {}
        self.failures: list[Outcome] = []

    def add(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self.counts.setdefault(outcome.name, collections.Counter())[outcome.status] += 1
            if outcome.status not in ("ok", "skipped"):
                self.failures.append(outcome)

    def total(self) -> collections.Counter[str]:
        return sum(self.counts.values(), collections.Counter())

    def passed(self) -> float:
        """The per cent of comparisons made that held."""
        total = self.total()
        made = sum(total.values()) - total["skipped"]
        return 100.0 * (total["ok"] + total["inexact"]) / made if made else 100.0

    def failing(self, status: str) -> list[str]:
        return sorted(name for name, counts in self.counts.items() if counts[status])

    def record(self, name: str) -> dict:
        """One line of the results file: everything known about ``name``."""
        counts = self.counts.get(name, {})
        failures = [dataclasses.asdict(f) for f in self.failures if f.name == name]
        return {"name": name, "counts": dict(counts), "failures": failures}

    def load(self, path: Path) -> set[str]:
        """Add what an earlier run left in ``path``; returns the names it had finished. The last line of a name counts."""
        records = {}
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue  # the run was ended while writing it
                if "name" in record:
                    records[record["name"]] = record
        for name, record in records.items():
            self.counts[name] = collections.Counter(record["counts"])
            self.failures = [f for f in self.failures if f.name != name]
            self.failures += [Outcome(**fields) for fields in record["failures"]]
        return set(records)

    def table(self) -> str:
        """Names that do not pass, then the totals."""
        rows = [f"{'name':52}" + "".join(f"{status:>9}" for status in STATUSES)]
        for name in sorted(self.counts):
            counts = self.counts[name]
            if counts["wrong"] or counts["raised"]:
                rows.append(f"{name:52}" + "".join(f"{counts[status]:>9}" for status in STATUSES))
        total = self.total()
        rows.append(f"{'total':52}" + "".join(f"{total[status]:>9}" for status in STATUSES))
        clean = sum(not (c["wrong"] or c["raised"]) for c in self.counts.values())
        rows.append(f"{self.passed():.2f} % of comparisons hold; {clean} of {len(self.counts)} names without a failure")
        wrong = [f for f in self.failures if f.status == "wrong"]
        if wrong:
            rows.append(f"silently wrong ({len(wrong)}):")
            rows += [f"  {f.where()}: {f.detail}" for f in wrong[:200]]
        return "\n".join(rows)
