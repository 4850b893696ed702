"""A call that turns out not to be like the recorded one leaves no trace before it is run anew, and what differs is noticed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dtorch
from dtorch import Shard

from .same import captured, close, placed, runs

pytestmark = pytest.mark.usefixtures("engine")

X = torch.arange(12.0).reshape(3, 4) / 7


def counting() -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A function that does something else every third call, by a counter of its own; the counter."""
    counter = torch.zeros((), dtype=torch.int64)

    def function(x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x * 2 if counter % 3 == 0 else x + 1

    return counter, function


def test_a_counter_is_counted_once() -> None:
    counter, function = counting()
    own, plain = counting()
    compiled = dtorch.compile(function)
    for step in range(9):
        close(compiled(placed(X + step)), plain(X + step))
        assert counter == own
    _, count = runs(compiled, placed(X))
    assert count == 1


def test_random_numbers_are_drawn_once() -> None:
    noise = torch.Generator().manual_seed(4)

    def function(x: torch.Tensor, counter: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        x = torch.nn.functional.dropout(x) + torch.rand(4) + torch.rand(4, generator=noise)
        counter.add_(1)
        return x * 2 if counter % 3 == 0 else x + 1

    def drawn(call: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        noise.manual_seed(4)
        counter = torch.zeros((), dtype=torch.int64)
        return [call(placed(X), counter, noise).to_torch() for _ in range(7)]

    for one, other in zip(drawn(dtorch.compile(function)), drawn(function), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_takes_no_more_steps() -> None:
    def trained(place: Any, wrap: Any) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(place(X.clone()))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        counter = torch.zeros((), dtype=torch.int64)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight * x).sin().sum()
            loss.backward()
            optimizer.step()
            optimizer.step()
            counter.add_(1)
            return loss.detach() * 2 if counter % 4 == 0 else loss.detach()

        step = wrap(step)
        losses = [step(place(X + n)) for n in range(10)]
        assert counter == 10
        assert optimizer.state[weight]["step"] == 20
        return [*losses, weight]

    expected = trained(lambda t: t, lambda f: f)
    found = trained(lambda t: placed(t, Shard(0)), dtorch.compile)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


def test_parameters_frozen_between_calls_under_an_inner_grad_mode() -> None:
    def trained(place: Any, wrap: Any) -> list[torch.Tensor | None]:
        weight, bias = torch.nn.Parameter(place(X.clone())), torch.nn.Parameter(place(X[0].clone()))

        def step(x: torch.Tensor) -> None:
            weight.grad = bias.grad = None
            with torch.enable_grad():
                (weight * x + bias).sin().sum().backward()

        step = wrap(step)
        found = []
        for n in range(6):
            bias.requires_grad_(n != 3)
            with torch.no_grad():
                step(place(X + n))
            found += [weight.grad, bias.grad]
        return found

    for one, other in zip(trained(placed, dtorch.compile), trained(lambda t: t, lambda f: f), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)


def test_a_dict_that_is_given_and_changed() -> None:
    def function(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        options["calls"] = options.get("calls", 0) + 1
        return x * options.pop("scale", 1)

    compiled = dtorch.compile(function)
    options = {"scale": 3}
    with pytest.warns(UserWarning, match="it changes a list or dict that it is given"):
        close(compiled(placed(X), options), X * 3)
    assert options == {"calls": 1}
    for _ in range(3):
        options = {"scale": 3}
        close(compiled(placed(X), options), X * 3)
        assert options == {"calls": 1}


def test_arrays_from_outside() -> None:
    array = np.ones(4, dtype=np.float32)
    of_array = (torch.tensor, torch.as_tensor, torch.asarray, lambda a: torch.tensor([a, a])[0])
    for make in (*of_array, lambda a: torch.from_numpy(a).double().float()):
        array[:] = 1
        compiled = dtorch.compile(lambda x, make=make: x + make(array))
        with pytest.warns(UserWarning, match="numpy"):
            close(compiled(placed(X)), X + 1)
        array[:] = 5
        close(compiled(placed(X)), X + 5)


def test_in_a_checkpoint() -> None:
    """Whose hooks of saved tensors count what a call saves, when it is recorded and when it is run again."""

    def trained(place: Any, wrap: Any) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(place(torch.eye(4) + 1))
        layer = wrap(lambda x: (x @ weight).sin())
        found = []
        for n in range(4):
            x = place(X + n).requires_grad_()
            checkpoint(layer, x, use_reentrant=False).sum().backward()
            found += [x.grad, weight.grad.clone()]
        return found

    for one, other in zip(trained(placed, dtorch.compile), trained(lambda t: t, lambda f: f), strict=True):
        close(one, other)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@dtorch.compile
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_compiled_module_has_its_modules_attributes() -> None:
    module = dtorch.distribute_module(Scaled(), placed(X).device_mesh, {"*": [Shard(0)]})
    compiled = dtorch.compile(module)
    compiled(placed(X))
    compiled.weight = torch.nn.Parameter(placed(torch.full((4,), 3.0), Shard(0)))
    assert module.weight is compiled.weight
    close(compiled(placed(X)), X * 3)
    compiled.note = "kept"
    assert module.note == "kept"
    del compiled.note
    assert not hasattr(module, "note")
    other = copy.deepcopy(compiled)
    with torch.no_grad():
        other.weight.mul_(2)
    other(placed(X))
    with torch.no_grad():
        close(captured(other, placed(X)), X * 6)
        close(compiled(placed(X)), X * 3)
    close(pickle.loads(pickle.dumps(compiled))(placed(X)), X * 3)
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert copy.deepcopy(doubled) is doubled
