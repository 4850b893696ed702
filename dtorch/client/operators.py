"""``x + y`` without a way through torch on which there is nothing to do.

From an operator to ``__torch_dispatch__`` and back is a third of what an op costs the client. For tensors that need no gradient, while
nobody looks on, torch changes nothing of the call on that way (`torch_internals.is_at_work`). So an operator whose plan is known is run
from here; all others take torch's way, where they are checked and planned.

Comparisons are left out: Python asks a subclass that has its own for ``plain == x`` first. Views, too: torch keeps what they are of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import get_default_dtype, is_grad_enabled, is_inference_mode_enabled

from ..tensor import Tensor
from . import inserted, runtime
from .controller import Controller
from .dispatch import CALLER, CallInfo, execute_inplace, execute_simple, info_of
from .planning import PLANS, key_of
from .torch_internals import has_function_mode, increment_version, is_at_work

aten = torch.ops.aten

#: What is called with another operand: the op for a tensor, and for a number if it takes one.
BINARY = {
    ("__add__", "add"): (aten.add.Tensor, aten.add.Tensor),
    ("__sub__", "sub"): (aten.sub.Tensor, aten.sub.Tensor),
    ("__mul__", "mul"): (aten.mul.Tensor, aten.mul.Tensor),
    ("__truediv__", "div"): (aten.div.Tensor, aten.div.Tensor),
    ("__pow__", "pow"): (aten.pow.Tensor_Tensor, aten.pow.Tensor_Scalar),
    ("__matmul__", "matmul", "mm"): (aten.mm.default, None),
}
#: What a number is the first operand of.
REFLECTED = {"__radd__": aten.add.Tensor, "__rmul__": aten.mul.Tensor}
#: What is called with a tensor or a number.
IN_PLACE = {
    ("__iadd__", "add_"): aten.add_.Tensor,
    ("__isub__", "sub_"): aten.sub_.Tensor,
    ("__imul__", "mul_"): aten.mul_.Tensor,
    ("__itruediv__", "div_"): aten.div_.Tensor,
}
#: What is called with nothing.
UNARY = {
    ("__neg__", "neg"): aten.neg.default,
    ("abs", "__abs__"): aten.abs.default,
    ("exp",): aten.exp.default,
    ("sqrt",): aten.sqrt.default,
    ("rsqrt",): aten.rsqrt.default,
    ("sigmoid",): aten.sigmoid.default,
    ("tanh",): aten.tanh.default,
}

#: Ints of more bits may not fit, which torch says.
_SMALL = range(-(1 << 31), 1 << 31)
#: `History.note` finds who called an operator one frame nearer than who came by way of torch.
_CALLER = CALLER - 1


def install(cls: type[torch.Tensor]) -> None:
    """Give ``cls`` these operators."""
    for names, (op, of_number) in BINARY.items():
        for name in names:
            base = getattr(cls, name)
            _set(cls, name, 1, _binary(base, info_of(op), None if of_number is None else info_of(of_number)))
    for name, op in REFLECTED.items():
        base = getattr(cls, name)
        _set(cls, name, 1, _reflected(_binary(base, info_of(op), info_of(op))))
    for names, op in IN_PLACE.items():
        for name in names:
            _set(cls, name, 1, _in_place(getattr(cls, name), info_of(op)))
    for names, op in UNARY.items():
        for name in names:
            _set(cls, name, 0, _unary(getattr(cls, name), info_of(op)))


def _set(cls: type[torch.Tensor], name: str, count: int, run: Callable[..., Any]) -> None:
    """Make ``run``, of so many arguments, a method; what an operator is not given goes to torch."""
    base = getattr(cls, name)

    def method(self: Any, *args: Any, **named: Any) -> Any:
        if named or len(args) != count:
            return base(self, *args, **named)
        return run(self, *args)

    found = run if name.startswith("__") else method
    found.__name__, found.__qualname__, found.__doc__ = name, f"{cls.__name__}.{name}", base.__doc__
    setattr(cls, name, found)


def _unary(base: Callable[..., Any], info: CallInfo) -> Callable[..., Any]:
    def run(self: Any) -> Any:
        if type(self) is Tensor and not (is_grad_enabled() and needs_gradient(self, self)):
            plan = PLANS.get((info, self._spec))
            if plan is not None and plan.is_simple and (controller := way()) is not None:
                return execute_simple(info, plan, (self,), (), controller, _CALLER)
        return base(self)

    return run


def _binary(base: Callable[..., Any], info: CallInfo, of_number: CallInfo | None) -> Callable[..., Any]:
    def run(self: Any, other: Any) -> Any:
        kind = type(other)
        if type(self) is not Tensor or (is_grad_enabled() and needs_gradient(self, other if kind is Tensor else self)):
            return base(self, other)
        if kind is Tensor:
            plan = PLANS.get((info, self._spec, other._spec))
            if plan is not None and plan.is_simple and (controller := way()) is not None:
                return execute_simple(info, plan, (self, other), (), controller, _CALLER)
        elif of_number is not None and (kind is float or (kind is int and other in _SMALL)):
            plan = PLANS.get(key_of(of_number, (self, other), {}, [], []))
            if plan is not None and plan.is_simple and (controller := way()) is not None:
                return execute_simple(of_number, plan, (self,), (other,), controller, _CALLER)
        return base(self, other)

    return run


def _reflected(run: Callable[..., Any]) -> Callable[..., Any]:
    def reflected(self: Any, other: Any) -> Any:
        # Python asks a subclass first: ``plain + x`` is for ``plain`` to answer.
        return NotImplemented if isinstance(other, torch.Tensor) else run(self, other)

    return reflected


def _in_place(base: Callable[..., Any], info: CallInfo) -> Callable[..., Any]:
    def run(self: Any, other: Any) -> Any:
        kind = type(other)
        if type(self) is not Tensor or (is_grad_enabled() and needs_gradient(self, other if kind is Tensor else self)):
            return base(self, other)
        if kind is Tensor:
            plan, tensors, numbers = PLANS.get((info, self._spec, other._spec)), (self, other), ()
        elif kind is float or (kind is int and other in _SMALL):
            plan, tensors, numbers = PLANS.get(key_of(info, (self, other), {}, [], [])), (self,), (other,)
        else:
            return base(self, other)
        if plan is not None and plan.is_inplace and not is_inference_mode_enabled():
            controller = way()
            if controller is not None and self._value.copy is None and not self.is_inference():
                increment_version([self])
                return execute_inplace(info, plan, tensors, numbers, controller, _CALLER)
        return base(self, other)

    return run


def needs_gradient(x: Tensor, y: Tensor) -> bool:
    """Whether torch may record an op on these; asked without a function mode, which would be told of it."""
    return has_function_mode() or x.requires_grad or (y is not x and y.requires_grad)


def way() -> Controller | None:
    """Who may be told at once to run an op; None if torch, or someone else, has something to do before."""
    controller = runtime._controller
    if controller is None or is_at_work():
        return None
    if inserted.mode != "allow" or get_default_dtype() is not controller.default_dtype:
        return None
    return controller
