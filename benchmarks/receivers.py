"""Whether an op costs the client the same however many workers there are.

A real channel, with receivers that only drain it (`benchmarks/drain.py`).
A batch is 64 commands of an eager op. The processor time of the sending thread is what Python
waits for; that of the whole process includes ZeroMQ's own thread, which writes to each receiver.
"""

from __future__ import annotations

import time

from .drain import drained
from .measure import Row, ratio, rounds, row

RECEIVERS = (1, 2, 8, 32)
BATCH = [[16, 1000 + index, 2000 + index, 3000 + index] for index in range(64)]


def run() -> list[Row]:
    thread: dict[int, list[float]] = {}
    process: dict[int, list[float]] = {}
    for count in RECEIVERS:
        thread[count] = _measure(count, time.thread_time)
        process[count] = _measure(count, time.process_time)
    rows = [row(f"send an op to {count} receivers, sending thread", thread[count]) for count in RECEIVERS]
    rows += [row(f"send an op to {count} receivers, with ZeroMQ's thread", process[count]) for count in RECEIVERS]
    rows.append(
        ratio("32 receivers over 1, sending thread", thread[32], thread[1], "flat: a small part of what an op costs")
    )
    return rows


def _measure(count: int, clock: object) -> list[float]:
    """Seconds an op."""
    with drained(count) as channel:
        number = 0

        def send() -> None:
            nonlocal number
            channel.send(number, BATCH)
            number += 1

        seconds = rounds({"send": send}, calls=100, between=lambda: time.sleep(0.1), clock=clock)["send"]
    return [one / len(BATCH) for one in seconds]
