"""What dtorch is measured against in `two_layers`: processes that run plain torch when told, and sleep otherwise."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import layers

#: Told a case, whether to train, how many times and with how many threads each; gives the last result when all processes have ended.
Told = Callable[[str, bool, int, int], Any]


@contextmanager
def started(processes: int) -> Iterator[Told]:
    """Peers, ready. The cases are "silent", which communicates nothing, and, of several processes, "gloo"."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        pipes, children = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            child = context.Process(target=_main, args=(theirs, rank, processes, f"{directory}/store"), daemon=True)
            child.start()
            pipes.append(ours)
            children.append(child)

        def tell(case: str, training: bool, times: int = 1, threads: int = 1) -> Any:
            for pipe in pipes:
                pipe.send((case, training, times, threads))
            first, *_ = [pipe.recv() for pipe in pipes]
            return first

        try:
            for pipe in pipes:
                pipe.recv()
            yield tell
        finally:
            for child in children:
                child.kill()
                child.join()


def _main(pipe: Any, rank: int, size: int, store: str) -> None:
    from torch._C import _distributed_c10d as c10d

    torch.set_num_threads(1)
    models = {"silent": layers.shard(layers.whole(), rank, size)}
    if size > 1:
        group = c10d.ProcessGroupGloo(c10d.FileStore(store, size), rank, size)
        models["gloo"] = layers.shard(layers.whole(), rank, size, *_by_hand(group))
    x = layers.tokens()
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    pipe.send("ready")
    while True:
        case, training, times, threads = pipe.recv()
        torch.set_num_threads(threads)
        for _ in range(times):
            if training:
                result = layers.train_step(models[case], optimizers[case], x)
            else:
                with torch.no_grad():
                    result = models[case](x)
        pipe.send(result.numpy())


def _by_hand(group: Any) -> tuple[layers.Step, layers.Step]:
    """Megatron's f and g: around a block of split weights, summed in backward at its start and in forward at its end."""

    def summed(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        group.allreduce([x]).wait()
        return x

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return summed(gradient)

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return summed(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    return Enter.apply, Leave.apply
