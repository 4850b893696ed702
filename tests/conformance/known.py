"""The failures we know of: `known.toml` says which names fail, how, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .outcome import Outcome

PATH = Path(__file__).with_name("known.toml")


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """One table of known.toml: ``status`` is ``raised`` or, with the best of reasons, ``wrong``."""

    status: str
    reason: str

    def __post_init__(self) -> None:
        if self.status not in ("raised", "wrong"):
            raise ValueError(f"known.toml: status must be 'raised' or 'wrong', got {self.status!r}")
        if not self.reason.strip():
            raise ValueError("known.toml: a known failure needs a reason")


def load(path: Path = PATH) -> dict[str, Known]:
    """The known failures by name."""
    return msgspec.toml.decode(path.read_bytes(), type=dict[str, Known])


def unexpected(outcomes: Iterable[Outcome], known: dict[str, Known]) -> list[Outcome]:
    """The failures among ``outcomes`` that are not known: a value known to raise must not turn silently wrong."""
    allowed = {"wrong": ("raised", "wrong"), "raised": ("raised",)}
    return [
        outcome
        for outcome in outcomes
        if outcome.status in ("wrong", "raised")
        and not (outcome.name in known and outcome.status in allowed[known[outcome.name].status])
    ]
