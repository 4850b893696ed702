"""A decode step of an unmodified Hugging Face Llama on two workers: what the client pays as the cache grows, so that ops meet new shapes.

First the ops of steps whose lengths are new: those whose plan is not known, and all. Then ``generate()`` of 64 tokens, a token: with a
growing cache whose lengths are new, the same once they are known, with a static cache, and plain torch with a growing cache. All by
the processor time of the calling thread, for the workers share the machine's two cores.

A bound in microseconds is one for a machine whose plain ``x + x`` takes 1.2 us (as in `plan_miss`): 60 us are 50 of those.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import dtorch
from dtorch.client import dispatch, planning

from .measure import Row, ratio, rounds, row

TOKENS = 64


def run() -> list[Row]:
    try:
        import transformers
    except ImportError:
        return []
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    mesh = dtorch.DeviceMesh("cpu", [0, 1], ("tp",))
    model = dtorch.distribute_module(copy.deepcopy(plain), mesh, "auto")
    ids = torch.randint(3, 60, (1, 7))
    placed = dtorch.from_torch(ids, mesh)

    def generate(given: Any, start: torch.Tensor, tokens: int = TOKENS, **options: Any) -> None:
        given.generate(start, max_new_tokens=tokens, do_sample=False, **options)

    generate(model, placed, 8)
    rows = _ops(lambda: generate(model, placed))

    def forget() -> None:
        """The lengths; not the forms of ops, nor what does not depend on lengths."""
        dtorch.synchronize()
        planning.PLANS.forget()
        generate(model, placed, 8)

    growing = lambda: generate(model, placed)
    static = lambda: generate(model, placed, cache_implementation="static")
    seconds: dict[str, list[float]] = {}
    for _ in range(6):
        forget()
        for name, function in (("new lengths", growing), ("known lengths", growing), ("static cache", static)):
            seconds.setdefault(name, []).append(_seconds(function))
        seconds.setdefault("plain torch", []).append(_seconds(lambda: generate(plain, ids)))
    seconds = {name: times[1:] for name, times in seconds.items()}
    rows += [row(f"generate(), {name}, a token", times, 1e3, "ms") for name, times in seconds.items()]
    for name, bound in (("static cache", 1.3), ("plain torch", 3)):
        rows.append(
            ratio(f"generate(), new lengths over {name}", seconds["new lengths"], seconds[name], f"at most {bound}")
        )
    dtorch.shutdown()
    return rows


def _seconds(function: Callable[[], object]) -> float:
    """The calling thread's, a token."""
    dtorch.synchronize()
    start = time.thread_time()
    function()
    return (time.thread_time() - start) / TOKENS


def _ops(function: Callable[[], object]) -> list[Row]:
    """The ops of ``function`` that meet new shapes: the calls that were planned."""
    small = torch.rand(4, 4)
    with _timed_calls() as calls:
        function()
    plain = statistics.median(rounds({"x + x": lambda: small + small}, calls=2000, clock=time.thread_time)["x + x"])
    missed = sorted([seconds for seconds, planned in calls if planned])
    late = [seconds for seconds, _ in calls]
    over = [seconds / plain for seconds in missed]
    *_, slowest = statistics.quantiles(over, n=20)
    return [
        row("an op that meets a new shape", missed),
        row("any op of such steps", late),
        Row("a new shape over plain x + x, median", statistics.median(over), "×", bound="at most 50"),
        Row("a new shape over plain x + x, 95th percentile", slowest, "×", bound="at most 167"),
        Row("ops that meet a new shape, a token", len(missed) / TOKENS, "ops"),
        Row("ops, a token", len(calls) / TOKENS, "ops"),
    ]


@contextmanager
def _timed_calls() -> Iterator[list[tuple[float, bool]]]:
    """(seconds, whether something was planned) of every call of an op meanwhile; those inside of another count with it."""
    call, make_plan = dispatch.call, dispatch.make_plan
    found: list[tuple[float, bool]] = []
    depth = planned = 0

    def timed(*args: Any) -> Any:
        nonlocal depth, planned
        if depth:
            return call(*args)
        depth, planned = 1, 0
        start = time.thread_time()
        try:
            return call(*args)
        finally:
            found.append((time.thread_time() - start, bool(planned)))
            depth = 0

    def counted(*args: Any) -> Any:
        nonlocal planned
        planned += 1
        return make_plan(*args)

    dispatch.call, dispatch.make_plan = timed, counted
    try:
        yield found
    finally:
        dispatch.call, dispatch.make_plan = call, make_plan
