"""A captured call is another one when a module is in another mode that it was asked for; modules that were not asked do not matter."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch

from .same import close, placed, runs

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.filterwarnings("error:dtorch.compile")]

X = torch.arange(6.0).reshape(2, 3)


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if self.training else 3)


class Quiet(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Derived(Quiet):
    """Its mode is kept elsewhere."""

    on = True

    @property
    def training(self) -> bool:  # type: ignore[override]
        return self.on

    @training.setter
    def training(self, mode: bool) -> None:
        self.on = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (3 if self.on else 4)


def _toggled(function: Callable[[torch.nn.Module, torch.Tensor], Any], module: torch.nn.Module) -> int:
    """Call it captured and plain in both modes, twice; how many recordings were made."""
    compiled = dtorch.compile(lambda x: function(module, x))
    for mode in (True, False, True, False):
        module.train(mode)
        expected = function(module, X)
        found, _ = runs(compiled, placed(X))
        close(found, expected)
    assert runs(compiled, placed(X))[1] == 1
    return len(compiled._keys)


def test_who_asks_is_recorded_for_each_mode() -> None:
    assert _toggled(lambda module, x: module(x), Scaled()) == 2
    assert _toggled(lambda module, x: x * module.training, Quiet()) == 2
    assert _toggled(lambda module, x: x * (2 if getattr(module, "training") else 3), Quiet()) == 2  # noqa: B009
    assert _toggled(lambda module, x: copy.deepcopy(module)(x), Scaled()) == 2
    assert _toggled(lambda module, x: module(x), Derived()) == 2
    assert _toggled(lambda module, x: torch.nn.functional.dropout(x, 0.0, module.training) + 1, Quiet()) == 2
    assert _toggled(lambda module, x: module(x), torch.nn.Sequential(Quiet(), torch.nn.Sequential(Scaled()))) == 2


def test_who_does_not_is_recorded_once() -> None:
    assert _toggled(lambda module, x: module(x), Quiet()) == 1
    assert _toggled(lambda module, x: module(x), torch.nn.Sequential(Quiet(), torch.nn.Tanh())) == 1


def test_a_mode_asked_for_in_backward() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
            ctx.module = module
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * (2 if ctx.module.training else 5), None

    module = Quiet()
    compiled = dtorch.compile(lambda x: Twice.apply(x, module))
    for mode in (True, False, True):
        module.train(mode)
        x, plain = placed(X).requires_grad_(), X.clone().requires_grad_()
        compiled(x).sum().backward()
        Twice.apply(plain, module).sum().backward()
        close(x.grad, plain.grad)


def test_a_function_that_changes_a_mode() -> None:
    def evaluated(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = module(x)
        module.eval()
        return found

    module, other = Scaled(), Scaled()
    compiled = dtorch.compile(lambda x: evaluated(module, x))
    for _ in range(4):
        close(compiled(placed(X)), evaluated(other, X))
    assert runs(compiled, placed(X))[1] == 1


def test_modules_are_left_as_they_were() -> None:
    module = Scaled()
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        def elsewhere() -> None:
            nested = dtorch.compile(module)
            nested(x)
            seen.append(len(nested._keys))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return module(x)

    dtorch.compile(function)(placed(X))
    assert seen == [1]
    assert "training" not in vars(torch.nn.Module)
    assert vars(module.eval())["training"] is False
    with pytest.raises(ZeroDivisionError):
        dtorch.compile(lambda x: x * (1 / 0))(placed(X))
    assert "training" not in vars(torch.nn.Module)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_is_run_op_by_op() -> None:
    for module in (torch.jit.script(Scaled()), torch.jit.trace(Scaled(), X)):
        compiled = dtorch.compile(lambda x, module=module: module(x))
        for number, mode in enumerate((True, False, True)):
            module.train(mode)
            told = (
                pytest.warns(UserWarning, match="op by op: a TorchScript module")
                if not number
                else contextlib.nullcontext()
            )
            with told:
                close(compiled(placed(X)), module(X))
