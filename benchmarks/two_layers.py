"""Two transformer layers (D=512, F=1536, S=128), tensor parallel on two workers of one thread each: forward, and with backward and SGD.

Beside it, in processes of their own that sleep meanwhile, plain torch: on each worker's shards with every reduction left out
("without communication": what is left of the time if communication costs nothing, nor do we); the hand-written SPMD program over
gloo; one process with two threads, and with one. A round is a few steps, until all have ended; the cases take turns. JAX is not
compared with: it is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dtorch
from dtorch import Replicate, Shard

from . import layers, peers
from .measure import Row, ratio, rounds, row

STEPS = {"forward": 4, "a training step": 2}
THREADS = "one process, two threads"
SILENT, GLOO, EAGER, CAPTURED = "without communication", "SPMD over gloo", "dtorch, op by op", "dtorch, captured"
PLAN = {f"*.{name}.weight": [Shard(0)] for name in layers.COLUMN} | {
    f"*.{name}.weight": [Shard(1)] for name in layers.ROW
}


def run() -> list[Row]:
    torch.set_num_threads(1)
    with peers.started(2) as two, peers.started(1) as one:
        rows = [line for what, steps in STEPS.items() for line in _compete(what, steps, two, one)]
    dtorch.shutdown()
    return rows


def _compete(what: str, steps: int, two: peers.Told, one: peers.Told) -> list[Row]:
    training = what != "forward"
    ours = {EAGER: _ours(training, captured=False), CAPTURED: _ours(training, captured=True)}
    expected = torch.from_numpy(one("silent", training))
    for value in [torch.from_numpy(two("gloo", training)), *[function().to_torch() for function in ours.values()]]:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4)
    contestants: dict[str, Callable[[], object]] = {
        SILENT: lambda: two("silent", training, steps),
        GLOO: lambda: two("gloo", training, steps),
        **{name: _repeated(function, steps) for name, function in ours.items()},
        THREADS: lambda: one("silent", training, steps, 2),
        "one process, one thread": lambda: one("silent", training, steps),
    }
    seconds = rounds(contestants, calls=1, repeat=11)
    rows = [row(f"{what}, {name}", [s / steps for s in times], 1e3, "ms") for name, times in seconds.items()]
    for name, bound in ((CAPTURED, 1.10), (EAGER, 1.25)):
        rows.append(ratio(f"{what}, {name}, over {SILENT}", seconds[name], seconds[SILENT], f"at most {bound:.2f}"))
    rows += [
        ratio(f"{what}, {GLOO} over {name}", seconds[GLOO], seconds[name], "at least 1.3") for name in (CAPTURED, EAGER)
    ]
    rows.append(ratio(f"{what}, {THREADS} over {CAPTURED}", seconds[THREADS], seconds[CAPTURED]))
    return rows


def _ours(training: bool, captured: bool) -> Callable[[], torch.Tensor]:
    mesh = dtorch.DeviceMesh("cpu", [0, 1], ("tp",))
    model = dtorch.distribute_module(layers.whole(), mesh, PLAN)
    x = dtorch.distribute_tensor(layers.tokens(), mesh, [Replicate()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> Any:
        if training:
            return layers.train_step(model, optimizer, x)
        with torch.no_grad():
            return model(x)

    run = dtorch.compile(step) if captured else step
    return lambda: run(x)


def _repeated(function: Callable[[], object], steps: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(steps):
            function()
        dtorch.synchronize()

    return several
