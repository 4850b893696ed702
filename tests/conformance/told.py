"""Whether all that is moved, and was not asked for, has been told before: else ``set_implicit_communication("error")`` lets it pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dtorch.client import controller as controllers
from dtorch.client import inserted
from dtorch.client.controller import Controller
from dtorch.engine import protocol
from dtorch.observe.communication import communication_of
from dtorch.observe.timing import program_called
from dtorch.program.ir import Communication

EXPLICIT = ("redistribute", "read", "gradient", "place")
"""What is moved as the program says, for values that it reads, for gradients on their way to leaves, for what is made."""


@contextmanager
def watching() -> Iterator[list[str]]:
    """Gives a list of what is moved and has not been told, nor asked for."""
    told: set[tuple[Any, Any]] = set()
    untold: list[str] = []

    def note(name: str, specs: Any, moves: Any, gathered: bool, call: Any) -> None:
        told.update((source.placements, target.placements) for source, target in moves)

    def look(controller: Controller, command: list[Any], name: str, sequence: int) -> None:
        if command[0] < protocol.FIRST_PROGRAM or name in EXPLICIT:
            return
        program = program_called(controller, command[0])
        if any(isinstance(instruction, Communication) for instruction in program.body):
            operands = command[len(command) - program.operands :] + program.constants
            moved = communication_of(program, operands, controller.meshes.__getitem__, name, False, "").values()
            untold.extend(
                f"{one.op}: {one.kind} of {one.shape} from {one.source} to {one.target}"
                for one in moved
                if (one.source, one.target) not in told
            )

    inserted.before_moves.append(note)
    controllers.observers.append(look)
    try:
        yield untold
    finally:
        controllers.observers.remove(look)
        inserted.before_moves.remove(note)
