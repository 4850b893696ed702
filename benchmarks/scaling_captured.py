"""A captured forward of 80 transformer layers on 8, 64 and 512 devices: what the client, the wire and a worker pay (docs/scaling.md).

The client is real, from the call to ZeroMQ, and so is what a worker does to lower the program, here for device 0; the workers only
drain what they are sent, all in one other process. Batches are split over dp, weights over the 8 devices of tp, on a (n / 8, 8) mesh.
Processor time of the thread. ``a + b n`` is the straight line through the medians.
"""

from __future__ import annotations

import time
from collections import defaultdict

import msgspec
import torch
from torch import nn

import dtorch
from dtorch import Shard
from dtorch.client import runtime
from dtorch.program.ir import Operand, Program, Reshard
from dtorch.sharding import pieces, transfer
from dtorch.sharding.spec import mesh_id
from dtorch.worker import lower
from dtorch.worker.bindings import Site, planner_of

from .measure import Row, row
from .scaling import DEVICES, cluster, flush, law

F = nn.functional
LAYERS, DIM, HIDDEN, HEAD_DIM, BATCH = 80, 64, 128, 8, 64


class Layer(nn.Module):
    """``(B, S, D)`` in and out; weights split as Megatron does."""

    def __init__(self, mesh: dtorch.DeviceMesh) -> None:
        super().__init__()
        shapes = {"q": (DIM, DIM), "k": (DIM, DIM), "v": (DIM, DIM), "up": (HIDDEN, DIM), "gate": (HIDDEN, DIM)}
        for name, shape in shapes.items():
            self.register_parameter(name, _weight(shape, mesh, 0))
        self.o, self.down = _weight((DIM, DIM), mesh, 1), _weight((DIM, HIDDEN), mesh, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(x, (DIM,))
        q, k, v = (F.linear(h, w).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.o)
        h = F.rms_norm(x, (DIM,))
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


def _weight(shape: tuple[int, int], mesh: dtorch.DeviceMesh, dim: int) -> nn.Parameter:
    return nn.Parameter(dtorch.zeros(shape, device_mesh=mesh, placements=[dtorch.Replicate(), Shard(dim)]))


def run() -> list[Row]:
    torch.set_num_threads(1)
    found: dict[str, dict[int, list[float]]] = defaultdict(dict)
    nbytes: dict[str, dict[int, int]] = defaultdict(dict)
    count_of_instructions = 0
    for count in DEVICES:
        with cluster(count) as engine, torch.no_grad():
            mesh = dtorch.init_device_mesh("cpu", (count // 8, 8), ("dp", "tp"))
            model = nn.Sequential(*[Layer(mesh) for _ in range(LAYERS)])
            x = dtorch.zeros(BATCH, 16, DIM, device_mesh=mesh, placements=[Shard(0), dtorch.Replicate()])
            captured = dtorch.compile(model)
            found["a step, op by op"][count] = [_seconds(lambda: model(x)) for _ in range(4)][1:]  # noqa: B023
            found["recording the step"][count] = [_seconds(lambda: captured(x))] * 2  # noqa: B023
            for _ in range(3):
                captured(x)
            flush()
            before = engine.nbytes
            captured(x)
            flush()
            nbytes["a captured step"][count] = engine.nbytes - before
            found["a captured step"][count] = [_seconds(lambda: captured(x)) for _ in range(40)]  # noqa: B023
            body = max((body for _, body in runtime.controller().program_bodies), key=len)
            nbytes["the program, sent once"][count] = len(body)
            program = msgspec.msgpack.decode(body, type=Program)
            count_of_instructions = len(program.body)
            found["a worker, lowering the program"][count] = [_lowered(body, mesh) for _ in range(5)]
    rows = []
    for name, by_count in found.items():
        rows += [row(f"{name}, {count} devices", seconds, 1e3, "ms") for count, seconds in by_count.items()]
        rows += law(name, by_count)
    rows += [
        Row(f"bytes on the wire: {name}, {count} devices", size, "bytes")
        for name, by_count in nbytes.items()
        for count, size in by_count.items()
    ]
    return [*rows, Row("instructions of the program", count_of_instructions, "")]


def _seconds(call: object) -> float:
    start = time.thread_time()
    call()  # type: ignore[operator]
    flush()
    return time.thread_time() - start


def _lowered(body: bytes, mesh: dtorch.DeviceMesh) -> float:
    """Seconds for device 0 to decode the program, write its function, and plan its part of each transfer, all for the first time."""
    for cached in (pieces.terms_of, transfer.steps, transfer._fibre, lower._compile):
        cached.cache_clear()
    start = time.thread_time()
    program = msgspec.msgpack.decode(body, type=Program)
    site = Site(0, torch.device("cpu"), {mesh_id(mesh): mesh})
    lower.bind(lower.generate(program, {mesh_id(mesh): True}, ()), site)
    for instruction in program.body:
        if isinstance(instruction, Reshard):
            shape = program.constant(instruction.shape) if type(instruction.shape) is Operand else instruction.shape
            planner_of(instruction).make(site)(tuple(shape))
    return time.thread_time() - start
