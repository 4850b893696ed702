"""Several Python threads issue ops, with autograd in each: each gets its own single-device results."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import dtorch

from .same import compare, every_engine, place, place_module

pytestmark = every_engine

X = torch.linspace(-2, 2, 24).reshape(4, 6)
LAYOUTS = ["first", "last", "replicated", "uneven", "grid", "partial"]


def train(x: Any, seed: int, layout: str | None, steps: int = 5) -> Any:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape).mul(seed + k).sin())
    if layout is not None:
        place_module(model, layout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) * x[:, :3]).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()], list(model.parameters())


def test_training_in_each_of_many_threads() -> None:
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(train, place(X, layout), seed, layout) for seed, layout in enumerate(LAYOUTS)]
        results = [job.result(timeout=120) for job in jobs]
    for seed, result in enumerate(results):
        compare(result, train(X, seed, None))


def test_threads_share_a_tensor() -> None:
    x = place(X, "first")
    weights = nn.Parameter(place(X, "first"))
    errors: list[BaseException] = []

    def read_and_differentiate(k: int) -> None:
        try:
            for n in range(10):
                (grad,) = torch.autograd.grad((x * weights * k + n).sum(), weights)
                compare(grad, X * k)
                compare(x[k % 4] + n, X[k % 4] + n)
        except BaseException as error:  # reported in the main thread
            errors.append(error)

    threads = [threading.Thread(target=read_and_differentiate, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_backward_of_a_graph_made_elsewhere() -> None:
    with ThreadPoolExecutor(1) as pool:
        w = nn.Parameter(place(X, "last"))
        loss = pool.submit(lambda: (w * w).sum()).result()
        pool.submit(loss.backward).result()
        compare(w.grad, 2 * X)


def test_grad_mode_and_no_sync_are_each_threads_own() -> None:
    w = nn.Parameter(place(X, "replicated"))
    x = place(X, "first")
    with ThreadPoolExecutor(1) as pool, torch.no_grad(), dtorch.no_sync():
        pool.submit(lambda: (x * w).sum().backward()).result()
        assert not (x * w).requires_grad
    compare(w.grad, X)
    assert w.grad.placements == w.placements


def test_asyncio_tasks_await_values() -> None:
    async def one(k: int) -> Any:
        x = place(X, LAYOUTS[k % len(LAYOUTS)])
        for _ in range(3):
            x = x + k
            await asyncio.sleep(0)
        return await x.to_torch_async()

    async def all_of_them() -> Any:
        return await asyncio.gather(*[one(k) for k in range(8)])

    for k, result in enumerate(asyncio.run(all_of_them())):
        compare(result, X + 3 * k)


def test_tensors_die_in_other_threads() -> None:
    def churn() -> None:
        for _ in range(100):
            y = place(X, "first") * 2
            del y

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(churn) for _ in range(4)]:
            job.result(timeout=60)
    compare(place(X, "first"), X)
