"""What the client pays for an eager op whose plan is known: dtorch on two workers, PyTorch's DTensor on a mesh of two, and plain torch.

All by the processor time of the thread that calls: two workers and a client share this machine's cores, and DTensor runs with torch's fake
process group, its own Python and C++ cost with nothing communicated. ``x + y`` is timed by the clock too. Tensors are (4, 4), sharded on
dim 0. Workers catch up between rounds, outside the time.

The parts of ``x + y``, and of ``torch.add(x, y)``, which goes through torch, are what docs/performance.md names; each is timed on its own,
in a loop that finds everything in the cache, so that they add up to less than the whole.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import dtorch
from dtorch.client import dispatch, operators, planning, runtime, torch_internals
from dtorch.client.handles import wrap
from dtorch.client.values import FREED, new_value
from dtorch.engine import protocol
from dtorch.engine.channel import ClientChannel

from .drain import drained
from .measure import Row, ratio, rounds, row

#: Commands in a batch, as a loop of ops is sent.
BATCH = 128


def run() -> list[Row]:
    torch.set_num_threads(1)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    x, y = [dtorch.distribute_tensor(torch.rand(4, 4), mesh, [dtorch.Shard(0)]) for _ in range(2)]
    w = dtorch.distribute_tensor(torch.rand(4, 4), mesh, [dtorch.Replicate()])
    ours, theirs, plain = _ops(x, y, w), _ops(*_dtensors()), _ops(*torch.rand(3, 4, 4))
    rows = []
    for name in ours:
        contestants = {"dtorch": ours[name], "DTensor": theirs[name], "torch": plain[name]}
        seconds = rounds(contestants, calls=1000, between=dtorch.synchronize, clock=time.thread_time)
        rows += [row(f"{who} {name}", times) for who, times in seconds.items()]
        bound = "at most 1" if "grad" in name else "at most 0.75"
        rows.append(ratio(f"{name}, dtorch over DTensor", seconds["dtorch"], seconds["DTensor"], bound))
    for mode, context in (("", torch.enable_grad), (", no_grad", torch.no_grad), (", inference", torch.inference_mode)):
        with context():
            both = {"dtorch": ours["x + y"], "DTensor": theirs["x + y"]}
            seconds = rounds(both, calls=2000, between=dtorch.synchronize)
        what = f"x + y{mode}, dtorch over DTensor by the clock"
        rows.append(ratio(what, seconds["dtorch"], seconds["DTensor"], "at most 1.2"))
    with drained(2) as channel:
        rows += _parts(x, y, channel)
    dtorch.shutdown()
    return rows


def _ops(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], Any]]:
    leaf = x.detach().clone().requires_grad_()
    written = x.detach().clone()
    return {
        "x + y": lambda: x + y,
        "x @ w": lambda: x @ w,
        "torch.add(x, y)": lambda: torch.add(x, y),
        "torch.mm(x, w)": lambda: torch.mm(x, w),
        "x.view(4, 2, 2)": lambda: x.view(4, 2, 2),
        "x.add_(y)": lambda: written.add_(y),
        "native_layer_norm, of three outputs": lambda: torch.native_layer_norm(x, (4,), None, None, 1e-5),
        "x + y with grad": lambda: leaf + y,
    }


def _dtensors() -> list[torch.Tensor]:
    import torch.distributed
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    split = [DTensor.from_local(torch.rand(2, 4), mesh, [Shard(0)]) for _ in range(2)]
    return [*split, DTensor.from_local(torch.rand(4, 4), mesh, [Replicate()])]


def _parts(x: Any, y: Any, channel: ClientChannel) -> list[Row]:
    """What ``x + y`` is made of, each part alone."""
    controller = runtime.controller()
    info = dispatch.info_of(torch.ops.aten.add.Tensor)
    key = planning.key_of(info, (x, y), {}, [], [])
    plan = planning.PLANS.get(key)
    spec, value = plan.outputs[0], x._value
    batch = [[plan.program_id, 1000 + i, 2000 + i, 3000 + i] for i in range(BATCH)]
    bare = _bare(spec)

    def lock() -> None:
        with controller.lock:
            pass

    def inputs() -> None:
        for tensor in (x, y):
            held = tensor._value
            if held.id < controller.floor or held.copy is not None:
                raise AssertionError

    def issue() -> None:
        with controller.lock:
            controller.issue([protocol.FREE])

    def free() -> None:
        for _ in range(BATCH):
            new_value()
        with controller.lock:
            controller.drain()
            controller.outbox.clear()
        FREED.clear()

    parts = {
        "torch, to __torch_dispatch__ and back; of torch.add(x, y) only": (lambda: torch.add(bare, bare), 1),
        "way: that torch has nothing to do; of x + y only": (lambda: operators.way(x, y), 1),
        "key: of the op and the specs": (lambda: planning.key_of(info, (x, y), {}, [], []), 1),
        "plan: looked up": (lambda: planning.PLANS.get(key), 1),
        "inputs: of this cluster, and no stale copy (generation)": (inputs, 1),
        "wrap: the new handle": (lambda: wrap(spec, value), 1),
        "user line": (lambda: controller.history.note(0, info.name, 2), 1),
        "lock": (lock, 1),
        "issue: checks, sequence number, outbox; with its share of sending empty commands": (issue, 1),
        "back-pressure": (lambda: controller.ran(0), 1),
        "encode": (lambda: channel._encode([0, batch]), BATCH),
        "encode and send, to two receivers that drain": (lambda: channel.send(0, batch), BATCH),
        "free: the value's birth, its finalizer, and its place in a command": (free, BATCH),
    }
    seconds = rounds(
        {name: function for name, (function, _) in parts.items()},
        calls=300,
        between=dtorch.synchronize,
        clock=time.thread_time,
    )
    return [row(f"of which {name}", [t / parts[name][1] for t in times]) for name, times in seconds.items()]


def _bare(spec: Any) -> torch.Tensor:
    """A tensor of a subclass that does nothing but give itself back."""

    class Bare(torch.Tensor):
        __torch_function__ = torch_internals.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0]

    return torch_internals.make_wrapper(*torch_internals.wrapper_arguments(Bare, spec.shape, spec.stride, spec.dtype))
