"""What stands in a worker's store for a value that a failed command should have made."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Poison:
    """A value that does not exist, because command ``origin[1]`` failed on device ``origin[0]``.

    It is no tensor and must never look like one: a torch op that gets it raises, which is how the fast path notices it
    without looking.
    """

    origin: tuple[int, int]
