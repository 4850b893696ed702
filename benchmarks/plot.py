"""The ratios of benchmarks/results.md that have a bound, as one picture: ``python -m benchmarks --plot``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "benchmarks.png"

_ROW = re.compile(r"\| (.+?) \| ([\d.e+-]+) (\S*) \| (?:([\d.e+-]+) to ([\d.e+-]+))? \| at (most|least) ([\d.]+) \|")


@dataclasses.dataclass(frozen=True, slots=True)
class Bounded:
    """One figure over its bound, or the bound over it where it is to be large: 1 is the bound, and less is better.

    ``low``, ``high``: the same of its quartiles, where it has any.
    """

    section: str
    what: str
    text: str
    share: float
    low: float
    high: float


def bounded(page: str) -> list[Bounded]:
    """The rows of a page of results that have a bound in numbers."""
    found = []
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        match = _ROW.fullmatch(line)
        if match:
            what, value, unit, low, high, direction, bound = match.groups()
            shares = [float(number or value) / float(bound) for number in (value, low, high)]
            if direction == "least":
                shares = [1 / share for share in (shares[0], shares[2], shares[1])]
            found.append(Bounded(section, what, f"{value} {unit} (at {direction} {bound})", *shares))
    return found


def draw(page: str, path: Path) -> None:
    """Write the picture.

    Raises:
        ValueError: no row has a bound.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = bounded(page)
    if not rows:
        raise ValueError("no row of the results has a bound")
    figure, axes = pyplot.subplots(figsize=(9, 0.9 + 0.27 * len(rows)), layout="constrained")
    for at, row in enumerate(rows):
        color = "tab:blue" if row.share <= 1 else "tab:orange"
        axes.plot([row.low, row.high], [at, at], color=color, linewidth=4, alpha=0.35, solid_capstyle="butt")
        axes.plot(row.share, at, "o", color=color)
        axes.annotate(row.text, (1.01, at), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [f"{row.section}: {row.what}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("median and quartiles, as a share of the bound: left of 1 is within it")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
