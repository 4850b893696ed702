"""A device's notes of what it runs: bounded, by instruction where it communicates, and only while they are wanted."""

from __future__ import annotations

import functools
from array import array

import msgspec
import pytest
import torch

from dtorch.engine import protocol
from dtorch.program.ir import Op, Operand, Program, Reshard, Slot
from dtorch.worker import tracing
from dtorch.worker.executor import Executor
from dtorch.worker.tracing import AFTER_FAILURE, FIELDS, WHOLE

PROGRAM = protocol.FIRST_PROGRAM
#: Gathers, computes, and gathers what it computed.
BODY = [
    Reshard(0, 1, 1, (0,), 1, (-1,), Operand(0), "float32"),
    Op("aten.neg.default", [Slot(1)], {}, [2]),
    Reshard(2, 3, 1, (0,), 1, (-1,), Operand(1), "float32"),
]


class Device:
    """The executor of device 0 of two, that is driven by hand."""

    def __init__(self) -> None:
        self.events: list[list] = []
        self.executor = Executor(0, self.events.append, None)  # type: ignore[arg-type]
        self.executor.run([protocol.MESH, 1, "cpu", [2], [0, 1], None], 0)
        program = Program("p", 1, 1, 2, BODY, [3])
        self.executor.run([protocol.DEFINE, PROGRAM, msgspec.msgpack.encode(program)], 1)
        self.executor.values[10] = torch.ones(2)

    def trace(self, what: str) -> dict | None:
        self.executor.run([protocol.TRACE, 7, what], 9)
        (kind, device, token, payload) = self.events.pop()
        assert (kind, device, token) == (protocol.REPLY, 0, 7)
        return payload

    def notes(self) -> list[tuple[int, ...]]:
        report = self.trace("read")
        assert report is not None
        numbers = array("q", report["notes"])
        return [tuple(numbers[at : at + FIELDS]) for at in range(0, len(numbers), FIELDS)]


@pytest.fixture
def device() -> Device:
    return Device()


def drive(device: Device, sequence: int, failing: int = -1) -> None:
    """Run the program, with what the other device would send; the transfer that is number ``failing`` fails."""
    with torch.no_grad():
        steps = device.executor.run([PROGRAM, 10, 11, [4], [8]], sequence)
        assert steps is not None
        next(steps)
        first, second = [
            functools.partial(steps.throw, MemoryError("none left"))
            if number == failing
            else functools.partial(steps.send, torch.ones(size))
            for number, size in enumerate((4, 8))
        ]
        first()
        with pytest.raises(StopIteration):
            second()


def test_each_exchange_is_noted_with_its_instruction(device: Device) -> None:
    device.trace("start")
    drive(device, 5)
    drive(device, 6)  # as it runs the second time, with its code settled
    notes = [note for note in device.notes() if note[3] == PROGRAM]
    assert [(note[2], note[4]) for note in notes] == [(s, i) for s in (5, 6) for i in (0, 2, WHOLE)]
    for first, second, whole in (notes[:3], notes[3:]):
        assert whole[0] <= first[0] <= first[1] <= second[0] <= second[1] <= whole[1]


def test_exchanges_after_a_failure(device: Device) -> None:
    device.trace("start")
    drive(device, 5, failing=0)
    assert [note[4] for note in device.notes() if note[3] == PROGRAM] == [0, AFTER_FAILURE, WHOLE]
    assert [event[0] for event in device.events] == [protocol.FAILED]


def test_nothing_is_noted_unless_it_is_wanted(device: Device) -> None:
    plain = device.executor.run
    assert device.trace("read") is None
    device.trace("start")
    drive(device, 5)
    device.executor.run([protocol.FREE, 11], 6)
    device.trace("start")  # nothing happens
    assert {note[2] for note in device.notes()} == {5, 9}
    assert device.trace("stop") is not None
    assert device.executor.run == plain
    assert device.trace("read") is None
    device.trace("start")
    assert device.notes() == []  # those before are forgotten


def test_notes_are_bounded(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "LIMIT", 4)
    device.trace("start")
    for sequence in range(3):
        drive(device, sequence)
    report = device.trace("read")
    assert report is not None
    assert len(report["notes"]) == 8 * FIELDS * 4
    assert report["left_out"] == 9 - 4
