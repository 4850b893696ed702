"""What `dtorch.compile` leaves the client to do: a step is checked, and one message sent.

The client's time is the processor time of the thread that calls: the workers have the same two cores. Between rounds they finish, untimed,
and the first call after such a wait costs several of those that follow it, since the processor has done something else meanwhile: a round
is 10 calls for the Hugging Face forward, 3 for the others. The checks are those of a model of 300 parameters.

A worker's instruction is what one more costs, by the clock: programs of 8000 and of 2000 tiny adds, the difference over 6000, beside the
same for torch. What a program costs as a whole, the message and the wait, is the difference's other part.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import dtorch

from .measure import Row, ratio, rounds, row

sys.path.append(str(Path(__file__).parents[1] / "examples" / "llama"))

MESH = dtorch.DeviceMesh("cpu", [0, 1], ("tp",))


def _contestants(name: str, eager: Any, captured: Any, calls: int = 3) -> list[Row]:
    for function in (eager, captured, captured, captured):
        function()
    seconds = rounds(
        {"eager": eager, "captured": captured},
        calls=calls,
        repeat=15,
        between=dtorch.synchronize,
        clock=time.thread_time,
    )
    return [
        row(f"{name}, op by op", seconds["eager"]),
        row(f"{name}, captured", seconds["captured"]),
        ratio(f"{name}, op by op over captured", seconds["eager"], seconds["captured"], "at least 20"),
    ]


def _llama() -> list[Row]:
    from model import Config, Llama

    model = Llama(Config(), MESH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randint(64, (4, 9))
    ids, targets = (dtorch.from_torch(t, MESH) for t in (tokens[:, :-1], tokens[:, 1:]))

    def train(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(ids).transpose(1, 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = dtorch.compile(train)
    rows = _contestants("Llama example, a training step", lambda: train(ids, targets), lambda: step(ids, targets))
    forward = dtorch.compile(model)
    one = ids[:, :1]
    with torch.no_grad():
        rows += _contestants("Llama example, one token forward", lambda: model(one), lambda: forward(one))
    return rows


def _hugging_face() -> list[Row]:
    try:
        import transformers
    except ImportError:
        return []
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = dtorch.distribute_module(transformers.LlamaForCausalLM(config).eval(), MESH, "auto")
    ids = dtorch.from_torch(torch.randint(64, (1, 8)), MESH)

    def decoder(wrap: Any) -> Any:
        """A function that makes one token after the other, with a static cache."""
        cache = transformers.StaticCache(config=config, max_cache_len=256)

        def step(tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = model(input_ids=tokens, past_key_values=cache, position_ids=positions).logits
            return logits[:, -1].argmax(-1, keepdim=True), positions + 1

        step = wrap(step)
        state = [ids[:, :1], dtorch.from_torch(torch.zeros(1, 1, dtype=torch.int64), MESH)]

        def token() -> None:
            state[:] = step(*state)

        return token

    compiled = dtorch.compile(model)
    with torch.no_grad():
        for _ in range(3):
            compiled(input_ids=ids, use_cache=False)
        seconds = rounds(
            {"captured": lambda: compiled(input_ids=ids, use_cache=False)},
            calls=10,
            between=dtorch.synchronize,
            clock=time.thread_time,
        )
        decoding = _contestants(
            "Hugging Face Llama, a token with a static cache", decoder(lambda step: step), decoder(dtorch.compile)
        )
    return [row("Hugging Face Llama forward, captured", seconds["captured"], bound="at most 100"), *decoding]


def _guards() -> list[Row]:
    layers = [torch.nn.Linear(2, 2) for _ in range(150)]
    model = dtorch.distribute_module(torch.nn.Sequential(*layers), MESH, {})
    compiled = dtorch.compile(model)
    x = dtorch.ones(2, 2, device_mesh=MESH)
    with torch.no_grad():
        compiled(x)
        captured = compiled.program

        def check() -> None:
            captured.matches([x])

        seconds = rounds({"check": check}, calls=50, clock=time.thread_time)
    return [row("checks of 300 parameters", seconds["check"], bound="at most 20")]


def _adds(count: int) -> Any:
    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = x + x
        return x

    return many


def _workers() -> list[Row]:
    """Seconds of a worker for each of many tiny adds in one program, beside plain torch's own."""
    few, many = 2000, 8000
    one = dtorch.DeviceMesh("cpu", [0])
    x, plain = dtorch.ones(4, device_mesh=one), torch.ones(4)
    functions = {count: (dtorch.compile(_adds(count)), _adds(count)) for count in (few, many)}

    def seconds(count: int) -> tuple[float, float]:
        compiled, eager = functions[count]
        start = time.perf_counter()
        compiled(x)
        dtorch.synchronize()
        middle = time.perf_counter()
        eager(plain)
        return middle - start, time.perf_counter() - middle

    with torch.no_grad():
        for count in (few, few, many, many):
            seconds(count)
        rounds_of = [(seconds(few), seconds(many)) for _ in range(15)]
    found, bare = [[(b[i] - a[i]) / (many - few) for a, b in rounds_of] for i in (0, 1)]
    over = [a - b for a, b in zip(found, bare, strict=True)]
    return [
        row("worker, an instruction of a captured program", found),
        row("the same in plain torch", bare),
        row("worker, over plain torch", over, bound="at most 0.7"),
    ]


def run() -> list[Row]:
    torch.set_num_threads(1)
    rows = [*_llama(), *_hugging_face(), *_guards(), *_workers()]
    dtorch.shutdown()
    return rows
