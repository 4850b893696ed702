"""Timing: medians over rounds that alternate between the things compared, so that a busy machine is busy for all of them."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the results: a quantity, and the bound that the project set itself, if any."""

    what: str
    value: float
    unit: str
    spread: str = ""
    bound: str = ""

    def __str__(self) -> str:
        return f"| {self.what} | {self.value:.3g} {self.unit} | {self.spread} | {self.bound} |"


def rounds(
    contestants: dict[str, Callable[[], object]],
    *,
    calls: int,
    repeat: int = 15,
    between: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a call of each contestant, one figure a round; ``between`` runs untimed after each. The first round is dropped."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeat + 1):
        for name, function in contestants.items():
            start = clock()
            for _ in range(calls):
                function()
            found[name].append((clock() - start) / calls)
            between()
    return {name: seconds[1:] for name, seconds in found.items()}


def row(what: str, seconds: list[float], scale: float = 1e6, unit: str = "us", bound: str = "") -> Row:
    """The median and the quartiles of ``seconds``."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return Row(what, middle * scale, unit, f"{low * scale:.3g} to {high * scale:.3g}", bound)


def ratio(what: str, over: list[float], under: list[float], bound: str = "") -> Row:
    """The median of the round-by-round ratios."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Row(what, middle, "×", f"{low:.3g} to {high:.3g}", bound)
