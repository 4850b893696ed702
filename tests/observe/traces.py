"""What a trace file says, and what every one must."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

CLIENT = 0


class Span(NamedTuple):
    """One span, in nanoseconds."""

    name: str
    category: str
    track: tuple[int, int]
    start: int
    stop: int
    about: dict[str, Any]

    def inside(self, other: Span) -> bool:
        return self.track == other.track and other.start <= self.start and self.stop <= other.stop


class Trace:
    """A file of `dtorch.profile`."""

    def __init__(self, path: Path) -> None:
        file = json.loads(path.read_text())
        self.about = file["otherData"]
        events = file["traceEvents"]
        self.spans = [
            Span(
                e["name"], e["cat"], (e["pid"], e["tid"]), _ns(e["ts"]), _ns(e["ts"]) + _ns(e["dur"]), e.get("args", {})
            )
            for e in events
            if e["ph"] == "X"
        ]
        self.names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.arrows = defaultdict(list)
        for e in events:
            if e["ph"] in "sf":
                self.arrows[e["id"]].append((e["ph"], (e["pid"], e["tid"]), _ns(e["ts"])))

    def of(self, process: int, category: str | None = None) -> list[Span]:
        return [s for s in self.spans if s.track[0] == process and category in (None, s.category)]

    def check(self) -> None:
        """Spans of one track nest; each arrow leads from a command's issue to a later run of it."""
        by_track = defaultdict(list)
        for span in self.spans:
            assert 0 <= span.start <= span.stop
            by_track[span.track].append(span)
        for spans in by_track.values():
            enclosing: list[Span] = []
            for span in sorted(spans, key=lambda s: (s.start, -s.stop)):
                while enclosing and enclosing[-1].stop <= span.start:
                    enclosing.pop()
                assert not enclosing or span.inside(enclosing[-1]), (enclosing[-1], span)
                enclosing.append(span)
        assert self.arrows
        for (tail, source, issued), (head, target, run) in self.arrows.values():
            assert (tail, head) == ("s", "f")
            assert source[0] == CLIENT
            assert target[0] != CLIENT
            assert issued <= run
            assert any(s.track == source and s.start <= issued <= s.stop for s in self.spans)
            assert any(s.track == target and s.start == run for s in self.spans)


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)
