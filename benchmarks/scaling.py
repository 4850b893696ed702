"""What an op costs the client on a mesh of 8, 64 or 512 devices, cached and met for the first time (docs/scaling.md).

The client is real, from the call to ZeroMQ; the workers only drain what they are sent, all in one other process. Processor time of the
thread that calls, on a (n / 8, 8) mesh. ``a + b n`` is the straight line through the medians.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy
import torch

import dtorch
from dtorch import Shard
from dtorch.client import runtime
from dtorch.engine.channel import ClientChannel

from .drain import drained
from .measure import Row, row

DEVICES = (8, 64, 512)
OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "x + x": lambda x: x + x,
    "x.sum(1)": lambda x: x.sum(1),
    "x.cumsum(0), which gathers": lambda x: x.cumsum(0),
}
CALLS, ROUNDS, SHAPES, TURNS = 500, 8, 24, 3


class Publisher:
    """An engine whose workers never answer: `dtorch.engine.interface.Engine` as far as an op that nobody reads needs it."""

    def __init__(self, channel: ClientChannel) -> None:
        self._channel = channel
        self._number = 0
        self.nbytes = 0

    def ensure(self, device_type: str, device_ids: Any) -> None:
        pass

    def send(self, commands: list[list]) -> None:
        self.nbytes += len(msgspec.msgpack.encode(commands))
        self._channel.send(self._number, commands)
        self._number += 1

    def behind(self) -> int:
        return 1  # as when Python runs ahead: batches are full

    def wait_behind(self, limit: int) -> None:
        pass

    def close(self) -> None:
        pass


def run() -> list[Row]:
    torch.set_num_threads(1)
    cached: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in OPS}
    first: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in OPS}
    nbytes: dict[int, int] = {}
    for turn, count in itertools.product(range(TURNS), DEVICES):
        with cluster(count) as engine, torch.no_grad():
            mesh = dtorch.init_device_mesh("cpu", (count // 8, 8), ("dp", "tp"))
            xs = [_placed(SHAPES * turn + size, mesh) for size in range(SHAPES)]  # new in every turn
            x = xs[0]
            x + x
            flush()
            before = engine.nbytes
            x * x
            flush()
            nbytes[count] = engine.nbytes - before
            for name, op in OPS.items():
                first[name][count] += [_seconds(lambda: op(x), 1) for x in xs][4:]  # noqa: B023
                cached[name][count] += [_seconds(lambda: op(x), CALLS) for _ in range(ROUNDS)][1:]  # noqa: B023
    rows = []
    for what, found in (("", cached), (", new shape", first)):
        for name, by_count in found.items():
            rows += [row(f"{name}{what}, {count} devices", seconds) for count, seconds in by_count.items()]
            rows += law(f"{name}{what}", by_count)
    rows += [Row(f"bytes of an op met for the first time, {count} devices", n, "bytes") for count, n in nbytes.items()]
    return rows


def law(what: str, by_count: dict[int, list[float]]) -> list[Row]:
    medians = [float(numpy.median(seconds)) * 1e6 for seconds in by_count.values()]
    slope, start = numpy.polyfit(list(by_count), medians, 1)
    return [Row(f"{what}: a", float(start), "us"), Row(f"{what}: b, for each device", float(slope) * 1e3, "ns")]


def _placed(size: int, mesh: dtorch.DeviceMesh) -> torch.Tensor:
    return dtorch.ones(1024, 8 + size, device_mesh=mesh, placements=[Shard(0), Shard(0)])


def _seconds(call: Callable[[], object], calls: int) -> float:
    start = time.thread_time()
    for _ in range(calls):
        call()
    seconds = (time.thread_time() - start) / calls
    flush()
    return seconds


def flush() -> None:
    controller = runtime.controller()
    with controller.lock:
        controller.flush()


@contextmanager
def cluster(count: int) -> Iterator[Publisher]:
    with drained(count) as channel:
        dtorch.init(engine="simulate")
        controller = runtime.controller()
        controller.engine.close()
        engine = Publisher(channel)
        controller.engine = engine  # type: ignore[assignment]
        try:
            yield engine
        finally:
            dtorch.shutdown()
