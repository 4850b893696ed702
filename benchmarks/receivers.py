"""Whether an op costs the client the same however many workers there are.

A real channel, with receivers that only drain it (`benchmarks/drain.py`). First the whole op, ``x + x`` from the call to ZeroMQ, by the
processor time of the thread that calls it. Then the sending alone, of 64 commands of an op at a time: the processor time of the
sending thread is what Python waits for; that of the whole process includes ZeroMQ's own thread, which writes to each receiver.
"""

from __future__ import annotations

import time

import torch

import dtorch

from .drain import drained
from .measure import Row, ratio, rounds, row
from .scaling import cluster, flush

RECEIVERS = (1, 2, 8, 32)
BATCH = [[16, 1000 + index, 2000 + index, 3000 + index] for index in range(64)]


def run() -> list[Row]:
    thread: dict[int, list[float]] = {}
    process: dict[int, list[float]] = {}
    for count in RECEIVERS:
        thread[count] = _measure(count, time.thread_time)
        process[count] = _measure(count, time.process_time)
    whole: dict[int, list[float]] = {1: [], 32: []}
    for count in (1, 32) * 6:
        whole[count] += _whole(count)
    rows = [row(f"x + x with {count} receivers", seconds) for count, seconds in whole.items()]
    rows.append(ratio("x + x with 32 receivers over 1", whole[32], whole[1], "at most 1.3"))
    rows += [row(f"send an op to {count} receivers, sending thread", thread[count]) for count in RECEIVERS]
    rows += [row(f"send an op to {count} receivers, with ZeroMQ's thread", process[count]) for count in RECEIVERS]
    return rows


def _whole(count: int) -> list[float]:
    """Seconds an ``x + x`` on a mesh of ``count`` devices."""
    with cluster(count), torch.no_grad():
        x = dtorch.ones(8 * count, 8, device_mesh=dtorch.init_device_mesh("cpu", count), placements=[dtorch.Shard(0)])
        return rounds({"x + x": lambda: x + x}, calls=500, repeat=6, between=flush, clock=time.thread_time)["x + x"]


def _measure(count: int, clock: object) -> list[float]:
    """Seconds an op."""
    with drained(count) as channel:
        number = 0

        def send() -> None:
            nonlocal number
            channel.send(number, BATCH)
            number += 1

        seconds = rounds({"send": send}, calls=100, between=lambda: time.sleep(0.05), clock=clock)["send"]
    return [one / len(BATCH) for one in seconds]
