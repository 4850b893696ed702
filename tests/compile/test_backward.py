"""Gradients of a captured call, inside of it and outside."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Shard
from dtorch.client import runtime
from dtorch.engine import protocol

from .same import MESH, captured, close, placed, runs

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("error:dtorch.compile")]

X = torch.arange(12.0).reshape(3, 4) / 7
W = torch.arange(16.0).reshape(4, 4) / 5 - 1


def model_and_plain() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.LayerNorm(6), torch.nn.Linear(6, 4))
    return dtorch.distribute_module(copy.deepcopy(plain), MESH, {"0.*": [Shard(0)], "3.weight": [Shard(1)]}), plain


def same_gradients(model: torch.nn.Module, plain: torch.nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            close(ours.grad, theirs.grad)
            assert ours.grad.placements == ours.placements


def test_backward_outside() -> None:
    model, plain = model_and_plain()
    function = dtorch.compile(model)
    for step in range(4):
        x, leaf = placed(X + step).requires_grad_(), (X + step).requires_grad_()
        with dtorch.record() as recording:
            out = function(x)
            out.square().sum().backward()
        plain(leaf).square().sum().backward()
        close(x.grad, leaf.grad)
        same_gradients(model, plain)  # accumulated over the steps
        if step:
            assert sum(op.name.endswith("Sequential") for op in recording.ops) == 2  # the call, and its backward


def test_two_calls_before_a_backward() -> None:
    model, plain = model_and_plain()
    function = dtorch.compile(model)
    for _ in range(2):
        (function(placed(X)) * function(placed(X + 1))).sum().backward()
        (plain(X) * plain(X + 1)).sum().backward()
        same_gradients(model, plain)


def test_some_results_only() -> None:
    a, b = (torch.nn.Parameter(placed(W + i)) for i in range(2))
    pa, pb = (torch.nn.Parameter(W + i) for i in range(2))

    def function(x: Any, a: Any, b: Any) -> Any:
        return {"loss": (x @ a).sum(), "more": (x @ b, x @ a), "ids": (x > 1).long(), "same": x}

    compiled = dtorch.compile(function)
    for step in range(3):
        for pick in (lambda r: r["loss"], lambda r: r["more"][0].sum(), lambda r: r["more"][1].sum() * r["loss"]):
            for parameter in (a, b, pa, pb):
                parameter.grad = None
            pick(compiled(placed(X + step), a, b)).backward()
            pick(function(X + step, pa, pb)).backward()
            for ours, theirs in ((a, pa), (b, pb)):
                assert (ours.grad is None) == (theirs.grad is None)
                if theirs.grad is not None:
                    close(ours.grad, theirs.grad)


def test_hooks_run_once() -> None:
    w, p = torch.nn.Parameter(placed(W)), torch.nn.Parameter(W.clone())
    for parameter in (w, p):
        parameter.register_hook(lambda grad: grad * 2)
    function = dtorch.compile(lambda x: (x @ w).relu())
    for _ in range(2):
        function(placed(X)).sum().backward()
        (X @ p).relu().sum().backward()
        close(w.grad, p.grad)


def test_frozen_parameters() -> None:
    model, plain = model_and_plain()
    function = dtorch.compile(model)
    function(placed(X)).sum().backward()
    plain(X).sum().backward()
    for module in (model, plain):
        module[0].weight.requires_grad_(False)
        module.zero_grad()
    function(placed(X)).sum().backward()
    plain(X).sum().backward()
    same_gradients(model, plain)


def test_what_was_written_before_backward_is_an_error() -> None:
    w = torch.nn.Parameter(placed(W))
    function = dtorch.compile(lambda x: (x * w).sum())
    function(placed(X[:1].repeat(4, 1).requires_grad_()))
    x = placed(X[:1].repeat(4, 1)).requires_grad_()
    for _ in range(2):
        loss = function(x)
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    loss = function(x)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_backward_inside() -> None:
    model, plain = model_and_plain()

    def step(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = module(x).square().mean()
        loss.backward()
        return loss.detach()

    function = dtorch.compile(step)
    for i in range(4):  # accumulates
        found, count = runs(function, model, placed(X + i))
        close(found, step(plain, X + i))
        same_gradients(model, plain)
    assert count == 1
    model.zero_grad(), plain.zero_grad()
    close(captured(function, model, placed(X)), step(plain, X))
    same_gradients(model, plain)


def test_a_loss_whose_graph_is_used_up() -> None:
    w = torch.nn.Parameter(placed(W))

    def step(x: torch.Tensor) -> torch.Tensor:
        w.grad = None
        loss = (x @ w).square().sum()
        loss.backward()
        return loss

    function = dtorch.compile(step)
    for _ in range(3):
        loss = function(placed(X))
        close(loss, (X @ W).square().sum())
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_graph_that_cannot_be_run_is_told_of_at_backward() -> None:
    w = torch.nn.Parameter(placed(W))

    def function(x: torch.Tensor) -> torch.Tensor:
        out = (x @ w).exp()
        out[0] *= 2  # exp has saved what it returned
        return out

    compiled = dtorch.compile(function)
    for _ in range(2):
        out = compiled(placed(X))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_dropout_and_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    w = torch.nn.Parameter(placed(W))

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout((x @ w).tanh(), 0.4)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)

    found = []
    for function in (twice, dtorch.compile(twice)):
        torch.manual_seed(3)
        w.grad = None
        for _ in range(3):
            function(placed(X)).sum().backward()
        found.append((w.grad.to_torch(), torch.rand(1)))
    torch.testing.assert_close(found[1][0], found[0][0])
    assert torch.equal(found[0][1], found[1][1])


def live() -> int:
    """Bytes on a device, of what Python still refers to."""
    gc.collect()
    dtorch.synchronize()
    return next(iter(dtorch.memory_stats(MESH).values()))["live"]


def test_what_was_saved_goes_with_the_graph() -> None:
    """It would otherwise live as long as the loss does: through the next step's forward."""
    model, _ = model_and_plain()
    function = dtorch.compile(lambda x: model(x).square().sum())
    x = placed(torch.rand(64, 4))
    for _ in range(2):
        function(x).backward()
    model.zero_grad()
    before = live()
    loss = function(x)
    assert live() > before + x.nbytes
    loss.backward()
    model.zero_grad()
    assert live() <= before + loss.nbytes


def test_gradients_that_are_replaced_go_before_new_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(placed(W))

    def step(x: torch.Tensor) -> None:
        weight.grad = None
        (x @ weight).sum().backward()

    function = dtorch.compile(step)
    for _ in range(2):
        function(placed(X))
    x, before = placed(X), weight.grad._value.id
    dtorch.synchronize()
    engine, commands = runtime.controller().engine, []
    monkeypatch.setattr(engine, "send", lambda batch, send=engine.send: (commands.extend(batch), send(batch)))
    function(x)
    dtorch.synchronize()
    freed = [at for at, command in enumerate(commands) if command[0] == protocol.FREE and before in command[1:]]
    ran = [at for at, command in enumerate(commands) if command[0] >= protocol.FIRST_PROGRAM]
    assert freed[0] < ran[0]
    close(weight.grad, X.sum(0)[:, None].expand(4, 4))
