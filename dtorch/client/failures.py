"""Failed commands: what their workers said of them, and who has been told."""

from __future__ import annotations

import builtins
import collections
import functools
import re
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import DTorchError, RemoteError
from .replies import Waiting

#: Failed commands whose description is kept.
KEPT = 1000

#: What a worker says of a value that it does not have.
_ABSENT = re.compile(r"value (\d+) is not in the store")


@functools.cache
def remote(kind: str) -> type[RemoteError]:
    """`RemoteError`, and what torch raises on one device too, so that ``except IndexError`` in ported code still catches."""
    raised = getattr(builtins, kind, None) or {"LinAlgError": torch.linalg.LinAlgError}.get(kind)
    if not (isinstance(raised, type) and issubclass(raised, Exception)) or issubclass(RemoteError, raised):
        return RemoteError
    return type(
        "RemoteError", (RemoteError, raised), {"__module__": RemoteError.__module__, "__doc__": RemoteError.__doc__}
    )


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed command, as its worker described it."""

    device: int
    sequence: int
    kind: str
    message: str
    coordinate: Any
    shapes: Any
    line: str

    def error(self) -> RemoteError:
        where = f"device {self.device}" + (
            "" if self.coordinate is None else f", mesh coordinate {tuple(self.coordinate)}"
        )
        shapes = "" if not self.shapes else f"\n  local shapes: {', '.join(str(tuple(s)) for s in self.shapes)}"
        return remote(self.kind)(f"{self.kind}: {self.message}\n  on {where}{shapes}\n{self.line}")


class Failures:
    """The failed commands of one cluster.

    A poisoned read may be heard of before the failure that it comes from: they are other workers' notes.
    """

    def __init__(self) -> None:
        self._found: collections.OrderedDict[tuple[int, int], Failure] = collections.OrderedDict()
        #: Commands that a read has reported already, on whichever device it met them.
        self._reported: set[int] = set()
        self._orphans: dict[tuple[int, int], list[Waiting]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def failed(self, event: list, line: str, floor: int, foreign: DTorchError) -> None:
        """Take a FAILED event. Values below ``floor`` are of another cluster, which is what ``foreign`` says."""
        _, device, sequence, name, message, coordinate, shapes = event
        absent = _ABSENT.fullmatch(message)
        if absent and int(absent[1]) < floor:
            name, message = "DTorchError", str(foreign)
        failure = self._found[device, sequence] = Failure(device, sequence, name, message, coordinate, shapes, line)
        if len(self._found) > KEPT:
            self._reported.discard(self._found.popitem(last=False)[1].sequence)
        for waiting in self._orphans.pop((device, sequence), ()):
            waiting.fail(self.report(failure))

    def poisoned(self, waiting: Waiting, origin: tuple[int, int]) -> None:
        """A read depends on the command that failed at ``origin`` (device, sequence number)."""
        found = self._found.get(origin)
        if found is not None:
            waiting.fail(self.report(found))
        else:
            self._orphans.setdefault(origin, []).append(waiting)

    def orphans(self) -> list[Waiting]:
        """Reads that still wait to hear why they failed; they are forgotten here."""
        pending = [waiting for group in self._orphans.values() for waiting in group]
        self._orphans.clear()
        return pending

    def unseen(self) -> Failure | None:
        """The first failure that nobody has been told of."""
        return next(iter(self.all_unseen()), None)

    def all_unseen(self) -> list[Failure]:
        """One failure of each command whose failure nobody has been told of."""
        found = {f.sequence: f for f in list(self._found.values()) if f.sequence not in self._reported}
        return list(found.values())

    def count_as_seen(self) -> None:
        """Nobody need be told of what has failed so far."""
        self._reported.update(failure.sequence for failure in self._found.values())

    def report(self, failure: Failure) -> RemoteError:
        """The error to raise for a failure, which counts as seen from now on."""
        self._reported.add(failure.sequence)
        return failure.error()
