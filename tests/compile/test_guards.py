"""Each change outside of a function that makes a recorded call useless is seen: what is computed is what plain torch computes."""

from __future__ import annotations

import collections
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard

from .same import MESH, captured, close, placed

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.filterwarnings("error:dtorch.compile")]

X = torch.arange(12.0).reshape(3, 4) / 7
W = torch.arange(16.0).reshape(4, 4) / 5 - 1
Place = Callable[..., Any]


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if self.training else x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4, bias=False))
        self.inner = Inner()
        self.blocks = torch.nn.ModuleList()
        self.tied = self.layers[2].weight
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.layers(x) * self.scale) + x @ self.tied
        for block in self.blocks:
            x = block(x)
        return x


def new_parameter(model: Any, place: Place) -> None:
    model.layers[0].weight = torch.nn.Parameter(place(W + 1))


def in_the_dict(model: Any, place: Place) -> None:
    model.layers[0]._parameters["weight"] = torch.nn.Parameter(place(W + 2))


def otherwise_placed(model: Any, place: Place) -> None:
    model.layers[0].weight = torch.nn.Parameter(place(W + 1, Shard(0)))


def other_data(model: Any, place: Place) -> None:
    model.layers[0].weight.data = place(W - 3, Shard(1))


def untied(model: Any, place: Place) -> None:
    model.layers[2].weight = torch.nn.Parameter(place(W * 2))


def another_activation(model: Any, place: Place) -> None:
    model.layers[1] = torch.nn.Sigmoid()


def one_more_layer(model: Any, place: Place) -> None:
    model.layers.append(torch.nn.Sigmoid())


def a_first_block(model: Any, place: Place) -> None:
    model.blocks.append(torch.nn.Sigmoid())


def one_layer_less(model: Any, place: Place) -> None:
    del model.layers[1]


def a_bias(model: Any, place: Place) -> None:
    model.layers[2].bias = torch.nn.Parameter(place(torch.ones(4)))


def no_bias(model: Any, place: Place) -> None:
    model.layers[0].bias = None


def a_buffer(model: Any, place: Place) -> None:
    model.scale = place(torch.full((4,), 3.0))


def an_inner_mode(model: Any, place: Place) -> None:
    model.inner.eval()


def frozen(model: Any, place: Place) -> None:
    model.layers[0].requires_grad_(False)


def frozen_past_our_class(model: Any, place: Place) -> None:
    torch.Tensor.requires_grad_(model.layers[0].weight, False)


def frozen_by_attribute(model: Any, place: Place) -> None:
    model.layers[0].weight.requires_grad = False


def detached(model: Any, place: Place) -> None:
    model.layers[0].weight.detach_()


def with_a_graph(model: Any, place: Place) -> None:
    model.scale.mul_(model.layers[0].bias)


CHANGES = [
    new_parameter, in_the_dict, otherwise_placed, other_data, untied, another_activation, one_more_layer, a_first_block, one_layer_less,
    a_bias, no_bias, a_buffer, an_inner_mode, frozen, frozen_past_our_class, frozen_by_attribute, detached, with_a_graph,
]  # fmt: skip


def as_it_is(tensor: torch.Tensor, *placements: Any) -> torch.Tensor:
    return tensor.clone()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("grad", [False, True], ids=["without grad", "with grad"])
def test_a_changed_model(change: Callable[[Any, Place], None], grad: bool) -> None:
    torch.manual_seed(0)
    plain = Model()
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, {})
    compiled = dtorch.compile(model)
    x = placed(X)

    def same() -> None:
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            if change is with_a_graph:  # which no program can go back through
                warnings.simplefilter("ignore")
            found, expected = compiled(x), plain(X)
        close(found, expected)
        assert found.requires_grad == expected.requires_grad
        if not expected.requires_grad:
            return
        model.zero_grad(), plain.zero_grad()
        found.sum().backward(retain_graph=change is with_a_graph)
        expected.sum().backward(retain_graph=change is with_a_graph)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                close(ours.grad, theirs.grad)

    same()
    same()
    with torch.set_grad_enabled(change is with_a_graph):
        change(plain, as_it_is)
        change(model, placed)
    same()
    same()


def test_a_parameter_that_is_another_at_every_call() -> None:
    """It is seen to change once, and looked up from then on: no call but the first is recorded."""
    model = dtorch.distribute_module(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), MESH, {})
    compiled = dtorch.compile(model)
    with torch.no_grad():
        compiled(placed(X))
        for step in range(12):
            model[0].weight = torch.nn.Parameter(placed(W + step))
            plain = torch.nn.functional.linear(X, W + step, model[0].bias.to_torch())
            plain = torch.nn.functional.linear(plain, model[1].weight.to_torch(), model[1].bias.to_torch())
            close(captured(compiled, placed(X)), plain)
        model[0].weight = torch.nn.Parameter(placed(W, Shard(0)))
        plain = torch.nn.functional.linear(X, W, model[0].bias.to_torch())
        close(
            compiled(placed(X)),
            torch.nn.functional.linear(plain, model[1].weight.to_torch(), model[1].bias.to_torch()),
        )


def test_an_argument_that_is_also_outside() -> None:
    weight = torch.nn.Parameter(placed(W))
    compiled = dtorch.compile(lambda x: x * weight)
    for given, expected in ((weight, W), (weight, W), (placed(W + 1), W + 1), (weight, W), (placed(W + 2), W + 2)):
        found = compiled(given)
        close(found, expected * W)
        weight.grad = None
        found.sum().backward()
        close(weight.grad, W * 2 if given is weight else expected)


def test_an_argument_that_is_also_outside_and_returned() -> None:
    outside = placed(W)

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * 2, outside, y

    compiled = dtorch.compile(function)
    other = placed(W + 1)
    for given in (outside, other, outside, other):
        _, one, two = compiled(placed(X), given)
        assert one is outside
        assert two is given


def test_a_view_that_changes_places_with_what_it_is_a_view_of() -> None:
    def run(first: Any, compiled: bool) -> list[Any]:
        outside = {"a": first, "b": first.t()}

        def function(x: torch.Tensor) -> Any:
            outside["a"], outside["b"] = outside["b"], outside["a"]
            outside["a"].add_(x)
            return x.sum()

        call = dtorch.compile(function) if compiled else function
        for number in range(4):
            call(placed(W + number) if compiled else W + number)
        return [outside["a"], outside["b"], first]

    with torch.inference_mode():
        for found, expected in zip(run(placed(W), True), run(W.clone(), False), strict=True):
            close(found, expected)


@pytest.mark.parametrize("swaps", [False, True], ids=["data is set", "tensors are swapped"])
def test_another_dtype(swaps: bool) -> None:
    model = dtorch.distribute_module(torch.nn.Linear(4, 4), MESH, {})
    compiled = dtorch.compile(lambda x: model(x.to(model.weight.dtype)))
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        with torch.no_grad():
            for convert in (model.double, model.float, model.double):
                compiled(placed(X))
                convert()
                dtype = model.weight.dtype
                plain = torch.nn.functional.linear(X.to(dtype), model.weight.to_torch(), model.bias.to_torch())
                for _ in range(2):
                    found = compiled(placed(X))
                    assert found.dtype == dtype
                    close(found, plain)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_tensors_that_are_swapped() -> None:
    one, other = placed(W), placed(W + 1)
    compiled = dtorch.compile(lambda x: x @ one)
    with torch.no_grad():
        for expected in (W, W + 1, W):
            close(compiled(placed(X)), X @ expected)
            close(captured(compiled, placed(X)), X @ expected)
            torch.utils.swap_tensors(one, other)


def test_another_mesh() -> None:
    other = DeviceMesh("cpu", [2, 3], ("x",))
    model = dtorch.distribute_module(torch.nn.Linear(4, 4), MESH, {})
    plain = torch.nn.functional.linear(X, model.weight.to_torch(), model.bias.to_torch())
    compiled = dtorch.compile(model)
    with torch.no_grad():
        for mesh in (MESH, other, MESH):
            for parameter in model.parameters():
                parameter.data = parameter.data.redistribute(mesh)
            x = dtorch.from_torch(X, mesh)
            for _ in range(2):
                found = compiled(x)
                close(found, plain)
                assert found.device_mesh == mesh


class Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def test_every_kind_of_place() -> None:
    """A closure's cell, an attribute, a slot, a class, an item of a list, of a dict and of an ordered one."""
    cell = placed(W)
    first = cell
    holder, slots, items, table = torch.nn.Module(), Slots(cell), [0, cell], {"t": cell}
    holder.t, ordered = cell, collections.OrderedDict(t=cell)

    class Class:
        tensor = cell

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x @ t for t in (cell, holder.t, slots.tensor, items[1], table["t"], ordered["t"], Class.tensor)]

    compiled = dtorch.compile(function)
    expected = [W] * 7

    def same() -> None:
        with torch.no_grad():
            for _ in range(2):
                for found, want in zip(compiled(placed(X)), expected, strict=True):
                    close(found, X @ want)

    same()
    for at in range(7):
        expected[at] = W + at + 1
        other = placed(expected[at])
        if at == 0:
            cell = other
        elif at == 1:
            holder.t = other
        elif at == 2:
            slots.tensor = other
        elif at == 3:
            items[1] = other
        elif at == 4:
            table["t"] = other
        elif at == 5:
            ordered["t"] = other
        else:
            Class.tensor = other
        same()
    close(first, W)


@pytest.mark.parametrize("start", ["none", "given"])
def test_gradients_that_come_and_go(start: str) -> None:
    """None and not None are two programs: one puts a gradient, the other adds to it."""
    ours, theirs = torch.nn.Parameter(placed(W)), W.clone().requires_grad_()

    def step_of(weight: Any) -> Callable[[Any], None]:
        return lambda x: (x @ weight).square().sum().backward()

    compiled, plain = dtorch.compile(step_of(ours)), step_of(theirs)
    for i in range(9):
        if (i // 2) % 2 == (start == "given"):
            ours.grad = theirs.grad = None
        compiled(placed(X + i)), plain(X + i)
        close(ours.grad, theirs.grad)


def test_gradients_that_are_looked_at() -> None:
    ours, theirs = ([make(W), make(W + 1)] for make in (lambda t: torch.nn.Parameter(placed(t)), torch.nn.Parameter))

    def norm_of(weights: list[Any]) -> Callable[[], torch.Tensor]:
        return lambda: torch.nn.utils.clip_grad_norm_(weights, 1.0)

    compiled, plain = dtorch.compile(norm_of(ours)), norm_of(theirs)
    for given in ((1, 0), (1, 0), (1, 1), (0, 1), (1, 1), (1, 0)):
        for a, b, there in zip(ours, theirs, given, strict=True):
            a.grad, b.grad = (placed(X[:1].repeat(4, 1)), X[:1].repeat(4, 1)) if there else (None, None)
        close(compiled(), plain())
        for a, b, there in zip(ours, theirs, given, strict=True):
            if there:
                close(a.grad, b.grad)


@pytest.mark.parametrize("first", [Shard(0), Shard(1)])
def test_a_view_of_an_argument_that_is_another_tensor_later(first: Any) -> None:
    def function(x: Any, holder: Any) -> Any:
        return (x + 1) @ holder.tensor

    holder, plain = torch.nn.Module(), torch.nn.Module()
    start = torch.arange(16.0).reshape(4, 4)
    x, plain_x = placed(start, first), start.clone()
    holder.tensor, plain.tensor = x.t(), plain_x.t()
    compiled = dtorch.compile(lambda x: function(x, holder))
    for step in range(4):
        close(compiled(x), function(plain_x, plain))
        x.add_(step)
        plain_x.add_(step)
    holder.tensor, plain.tensor = placed(W, Shard(1 - first.dim)), W
    for _ in range(2):
        close(compiled(x), function(plain_x, plain))
