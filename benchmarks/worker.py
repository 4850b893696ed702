"""What a worker adds to an instruction: an eager ``add`` run by the executor from its command, and bare ``torch.add``."""

from __future__ import annotations

import msgspec
import torch

from dtorch.engine import protocol
from dtorch.program.ir import Op, Program, Slot
from dtorch.worker.executor import Executor

from .measure import Row, ratio, rounds, row


def run() -> list[Row]:
    torch.set_num_threads(1)
    executor = Executor(0, lambda event: None, None)  # type: ignore[arg-type]  # no command here carries bytes
    program = Program("add", 0, 2, 0, [Op("aten.add.Tensor", [Slot(0), Slot(1)], {}, [2], [[0, 1]])], [2])
    commands = [
        [protocol.MESH, 0, "cpu", [1], [0], None],
        [protocol.DEFINE, protocol.FIRST_PROGRAM, msgspec.msgpack.encode(program)],
    ]
    for sequence, command in enumerate(commands):
        executor.run(command, sequence)
    x, y = torch.rand(4, 4), torch.rand(4, 4)
    executor.values.update({1: x, 2: y})
    add, free = [protocol.FIRST_PROGRAM, 1, 2, 3], [protocol.FREE, 3]

    def with_free() -> None:
        executor.run(add, 2)
        executor.run(free, 3)

    with torch.inference_mode():
        seconds = rounds(
            {"bare torch.add": lambda: torch.add(x, y), "add": lambda: executor.run(add, 2), "add and free": with_free},
            calls=5000,
        )
    rows = [row(name, times) for name, times in seconds.items()]
    extra = [a - b for a, b in zip(seconds["add and free"], seconds["bare torch.add"], strict=True)]
    rows.append(row("a worker adds, with its free", extra, bound="at most 5"))
    rows.append(ratio("add over bare torch.add", seconds["add"], seconds["bare torch.add"]))
    return rows
