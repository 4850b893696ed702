"""What each pass over a captured program gains: the same function recorded without the pass and with it, on two workers, in turn.

A call is timed until the workers are done. Bytes are what the device that receives most receives; memory is what a worker's process holds
at most during a call, beyond what it held before.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dtorch
from dtorch import Replicate, Shard
from dtorch.capture.passes import without
from dtorch.client import runtime

from .measure import Row, ratio

sys.path.append(str(Path(__file__).parents[1] / "examples" / "llama"))

MESH = dtorch.DeviceMesh("cpu", [0, 1], ("x",))
ROUNDS = 15


class Compared:
    """A function, recorded with and without a pass, or what ``backend`` does."""

    def __init__(self, function: Callable[..., Any], args: list[Any], *passes: str, backend: str | None = None) -> None:
        self._args = args
        self.off = dtorch.compile(lambda *given: function(*given))
        self.on = dtorch.compile(lambda *given: function(*given), backend=backend)
        with without(*passes):
            for _ in range(3):
                self.call(self.off)
        for _ in range(3):
            self.call(self.on)

    def call(self, compiled: Any) -> float:
        """The seconds of a call."""
        start = time.perf_counter()
        compiled(*self._args)
        dtorch.synchronize()
        return time.perf_counter() - start

    def speed(self, what: str) -> Row:
        """Without the pass over with it."""
        found: dict[Any, list[float]] = {self.off: [], self.on: []}
        for _ in range(ROUNDS):
            for compiled, seconds in found.items():
                seconds.append(self.call(compiled))
        return ratio(f"{what}: time without over with", found[self.off], found[self.on])

    def collectives(self, what: str) -> list[Row]:
        """How many, and how many bytes."""
        rows = []
        for name, compiled in (("without", self.off), ("with", self.on)):
            with dtorch.record() as recording:
                compiled(*self._args)
            rows.append(Row(f"{what}: collectives {name}", len(recording.communication), ""))
            nbytes = sum(one.nbytes for one in recording.communication)
            rows.append(Row(f"{what}: bytes {name}", nbytes / 1024, "KB"))
        return rows

    def instructions(self, what: str) -> list[Row]:
        pairs = (("without", self.off), ("with", self.on))
        return [Row(f"{what}: instructions {name}", one.program.instructions, "") for name, one in pairs]


def _sharded(*shape: int) -> Any:
    return dtorch.randn(*shape, device_mesh=MESH, placements=[Shard(0)])


def _training() -> tuple[Callable[..., Any], list[Any]]:
    """A step of SGD on a stack of twelve linear layers, the batch split and the parameters replicated."""
    model = nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(64, 64), nn.GELU())])
    model = dtorch.distribute_module(model, MESH, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, [_sharded(64, 64)]


def _reuse() -> list[Row]:
    def attention(x: Any, *weights: Any) -> list[Any]:
        """Projections of one hidden state by layers that share gathered weights, and a mask that each works out again."""
        found = []
        for _ in range(2):
            for weight in weights:
                mask = torch.softmax((x @ x.t()).tril(), -1)
                found.append(mask @ (x @ weight.redistribute(placements=[Replicate()])))
        return [torch.stack(found).sum(0)]

    shared = Compared(attention, [_sharded(512, 256), *[_sharded(256, 256) for _ in range(3)]], "reuse")
    return [
        shared.speed("reuse, what is computed twice"),
        *shared.instructions("reuse, what is computed twice"),
        *shared.collectives("reuse, what is computed twice"),
        *_llama().instructions("reuse, a training step of the Llama example"),
    ]


def _llama() -> Compared:
    from model import Config, Llama

    model = Llama(Config(), dtorch.DeviceMesh("cpu", [0, 1], ("tp",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Compared(step, [dtorch.from_torch(torch.randint(64, (4, 8)), model.head.weight.device_mesh)], "reuse")


def _scatter() -> list[Row]:
    addends = _sharded(2, 3072, 3072)

    def whole(x: Any) -> Any:
        return x.sum(0).redistribute(placements=[Replicate()])

    def parts(x: Any) -> Any:
        return (nn.functional.gelu(whole(x)) * 2).redistribute(placements=[Shard(0)])

    def gathered(x: Any) -> Any:
        x = whole(x)
        return torch.softmax(nn.functional.gelu(x) * x, 0)

    enough, needed = Compared(parts, [addends], "scatter"), Compared(gathered, [addends], "scatter")
    return [
        enough.speed("reduce-scatter, shards are enough"),
        *enough.collectives("reduce-scatter, shards are enough"),
        needed.speed("reduce-scatter and all-gather"),
        *needed.collectives("reduce-scatter and all-gather"),
    ]


def _buckets() -> list[Row]:
    compared = Compared(*_training(), "buckets")
    return [compared.speed("buckets, data-parallel training"), *compared.collectives("buckets, data-parallel training")]


def _overlap() -> list[Row]:
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(512, 1536, bias=False), nn.GELU(), nn.Linear(1536, 512, bias=False))
    ]
    plan = {f"{index}.weight": [Shard(0 if index % 3 == 0 else 1)] for index in range(12) if index % 3 != 1}
    model = dtorch.distribute_module(nn.Sequential(*layers), MESH, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def turns(first: Any, second: Any) -> Any:
        whole = first.sort(-1).values.sum(0).redistribute(placements=[Replicate()])
        return second.sort(-1).values, whole.sum(0)

    training = Compared(step, [dtorch.randn(128, 512, device_mesh=MESH)], "overlap")
    # What is in order is sorted five times as fast: the devices are slow in turn.
    rows = torch.stack([torch.rand(32, 4096), torch.arange(4096.0).expand(32, 4096)])
    args = [dtorch.distribute_tensor(one, MESH, [Shard(0)]) for one in (rows, rows.flip(0))]
    uneven = Compared(turns, args, "overlap")
    return [
        training.speed("overlap, tensor-parallel training"),
        uneven.speed("overlap, devices that are slow in turn"),
    ]


def _dead() -> list[Row]:
    def function(x: Any, weight: Any) -> Any:
        kept = x
        for _ in range(8):
            (kept @ weight).softmax(-1)  # say, attention weights that nobody asked for
            kept = (kept @ weight).relu()
        return kept

    compared = Compared(function, [_sharded(512, 256), dtorch.randn(256, 256, device_mesh=MESH) / 16], "dead", "reuse")
    return [compared.speed("dead work"), *compared.instructions("dead work")]


def _inductor() -> list[Row]:
    def chain(x: Any) -> Any:
        return torch.nn.functional.gelu((x * 2 + 1).sigmoid() * x).square() - x

    def layer(x: Any, weight: Any) -> Any:
        return torch.nn.functional.silu(torch.nn.functional.layer_norm(x, x.shape[-1:]) @ weight) + x

    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return []
    cases = {
        "a chain of elementwise ops": (chain, [_sharded(2048, 1024)]),
        "norm, product, silu and sum": (layer, [_sharded(1024, 256), dtorch.randn(256, 256, device_mesh=MESH)]),
    }
    return [
        Compared(function, args, backend="inductor").speed(f"inductor, {what}")
        for what, (function, args) in cases.items()
    ]


def _free() -> list[Row]:
    """What a worker holds of a chain of eight results, 40 MB of each: the program frees a value after its last use.

    (Smaller blocks libc may keep when they are freed.)
    """

    def chain(x: Any, keep: bool) -> Any:
        kept = [x]
        for _ in range(8):
            kept.append(kept[-1] + 1)
            if not keep:
                del kept[0]
        return kept if keep else kept[-1]

    x = _sharded(2, 10 << 20)
    rows = []
    for name, keep in (("that returns them all", True), ("that returns the last", False)):
        compiled = dtorch.compile(chain)
        compiled(x, keep)
        dtorch.synchronize()
        rows.append(Row(f"free at last use, peak memory of a chain {name}", _peak(lambda: compiled(x, keep)), "MB"))  # noqa: B023
    return rows


def _peak(call: Callable[[], Any]) -> float:
    """MB that the first worker's process holds more at most while ``call`` runs than before."""
    pid = runtime.controller().engine.workers()[0][0]
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts anew
    before = _status(pid, "VmRSS")
    result = call()
    dtorch.synchronize()
    del result
    return (_status(pid, "VmHWM") - before) / 1024


def _status(pid: int, name: str) -> int:
    """A size in KB that the kernel tells of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def run() -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [*_reuse(), *_scatter(), *_buckets(), *_overlap(), *_dead(), *_inductor(), *_free()]
    dtorch.shutdown()
    return rows
