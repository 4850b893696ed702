"""A training step is one program, and a scheduler outside goes on changing its learning rate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import dtorch
from dtorch import Shard

from .same import MESH, close, placed, runs

pytestmark = [pytest.mark.usefixtures("engine"), pytest.mark.filterwarnings("error:dtorch.compile")]

X = torch.arange(12.0).reshape(3, 4) / 7
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9)),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
}


def step_of(model: Any, optimizer: Any) -> Callable[[Any], Any]:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    return dtorch.distribute_module(copy.deepcopy(plain), MESH, {"0.*": [Shard(0)], "2.weight": [Shard(1)]}), plain


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training(name: str) -> None:
    model, plain = models()
    steps, schedulers, counts, optimizers = [], [], [], []
    for module in (model, plain):
        optimizer = OPTIMIZERS[name](module.parameters())
        optimizers.append(optimizer)
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8))
        steps.append(step_of(module, optimizer))
    steps[0] = dtorch.compile(steps[0])
    for i in range(9):
        found, count = runs(steps[0], placed(X + i / 10))
        counts.append(count)
        close(found, steps[1](X + i / 10))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=1e-5)
        for scheduler in schedulers:
            scheduler.step()
    assert counts[-1] == 1
    if name != "RAdam":  # which does something else from its sixth step on
        assert counts[3:] == [1] * 6
    ours, theirs = (optimizer.state_dict()["state"] for optimizer in optimizers)
    for number, state in theirs.items():
        for key, value in state.items():
            found = ours[number][key]
            if isinstance(value, torch.Tensor):
                found = found.to_torch() if isinstance(found, dtorch.Tensor) else found
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


def test_settings_that_change() -> None:
    model, plain = models()
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (model, plain)]
    steps = [step_of(module, optimizer) for module, optimizer in zip((model, plain), optimizers, strict=True)]
    steps[0] = dtorch.compile(steps[0])
    for i in range(12):
        for optimizer in optimizers:
            group = optimizer.param_groups[0]
            group["betas"] = (0.9 - i / 100, 0.99)
            group["weight_decay"] = 0.0 if i > 8 else 0.01 * i
            group["lr"] = 0.05 if i % 2 else 2.0
        close(steps[0](placed(X)), steps[1](X))


def test_zero_grad_at_the_end() -> None:
    model, plain = models()

    def step(module: Any, optimizer: Any, x: Any) -> Any:
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (model, plain)]
    compiled = dtorch.compile(step)
    for i in range(5):
        found, count = runs(compiled, model, optimizers[0], placed(X + i))
        close(found, step(plain, optimizers[1], X + i))
        assert all(parameter.grad is None for parameter in model.parameters())
    assert count == 1


def test_a_scheduler_inside_is_run_op_by_op() -> None:
    model, plain = models()
    found = []
    for module in (model, plain):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        inner = step_of(module, optimizer)

        def step(x: Any, inner: Any = inner, scheduler: Any = scheduler) -> Any:
            loss = inner(x)
            scheduler.step()
            return loss

        found.append(step)
    compiled = dtorch.compile(found[0])
    with pytest.warns(UserWarning, match="scheduler step outside"):
        close(compiled(placed(X)), found[1](X))
    for _ in range(3):
        close(compiled(placed(X)), found[1](X))


def _lower_rate(optimizer: Any, seen: list[int]) -> None:
    optimizer.param_groups[0]["lr"] = 0.025


def _raise_decay(optimizer: Any, seen: list[int]) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.5


def _ask_for_momentum(optimizer: Any, seen: list[int]) -> None:
    optimizer.param_groups[0]["momentum"] = 0.9


def _drop_a_parameter(optimizer: Any, seen: list[int]) -> None:
    del optimizer.param_groups[0]["params"][1]


def _split_the_group(optimizer: Any, seen: list[int]) -> None:
    parameter = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [parameter], "lr": 0.3})


def _add_a_hook(optimizer: Any, seen: list[int]) -> None:
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))


def _add_a_late_hook(optimizer: Any, seen: list[int]) -> None:
    optimizer.register_step_post_hook(lambda *_: seen.append(1))


def _change_the_rate_in_a_hook(optimizer: Any, seen: list[int]) -> None:
    optimizer.register_step_pre_hook(
        lambda chosen, *_: chosen.param_groups[0].update(lr=chosen.param_groups[0]["lr"] / 2)
    )


def _wrap_the_step(optimizer: Any, seen: list[int]) -> None:
    step = optimizer.step

    def counted(*args: Any) -> Any:
        seen.append(1)
        return step(*args)

    optimizer.step = counted


def _load_state(optimizer: Any, seen: list[int]) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        _lower_rate, _raise_decay, _ask_for_momentum, _drop_a_parameter, _split_the_group, _add_a_hook, _add_a_late_hook,
        _change_the_rate_in_a_hook, _wrap_the_step, _load_state,
    ],
)  # fmt: skip
@pytest.mark.parametrize("foreach", [None, False])
def test_an_optimizer_without_state_is_changed_when_it_has_long_been_the_same(
    change: Callable[[Any, list[int]], None], foreach: bool | None
) -> None:
    """Its own code is not run while nothing that it depends on has changed."""
    model, plain = models()
    steps: list[Any] = []
    optimizers: list[Any] = []
    for module in (model, plain):
        optimizers.append(torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.01, foreach=foreach))
        steps.append(step_of(module, optimizers[-1]))
    steps[0] = dtorch.compile(steps[0])
    seen: list[list[int]] = [[], []]
    for i in range(12):
        if i == 6:
            for optimizer, one in zip(optimizers, seen, strict=True):
                change(optimizer, one)
        close(steps[0](placed(X + i / 10)), steps[1](X + i / 10))
        assert seen[0] == seen[1]
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=1e-5)


def test_the_hooks_of_every_optimizer_are_called() -> None:
    model, _ = models()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dtorch.compile(step_of(model, optimizer))
    for _ in range(4):
        step(placed(X))
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda chosen, *_: seen.append(chosen)),
        register_optimizer_step_post_hook(lambda chosen, *_: seen.append(chosen)),
    ]
    try:
        step(placed(X))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [optimizer] * 2
    step(placed(X))
    assert len(seen) == 2
