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
from .torch_internals import any_requires_grad, increment_version, is_at_work

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
#: Stands for an operand that was not given: torch says so.
_MISSING: Any = object()


def install(cls: type[torch.Tensor]) -> None:
    """Give ``cls`` these operators."""
    for names, (op, of_number) in BINARY.items():
        for name in names:
            base = getattr(cls, name)
            _set(cls, name, _binary(base, info_of(op), None if of_number is None else info_of(of_number)))
    for name, op in REFLECTED.items():
        _set(cls, name, _reflected(_binary(getattr(cls, name), info_of(op), info_of(op))))
    for names, op in IN_PLACE.items():
        for name in names:
            _set(cls, name, _in_place(getattr(cls, name), info_of(op)))
    for names, op in UNARY.items():
        for name in names:
            _set(cls, name, _unary(getattr(cls, name), info_of(op)))


def _set(cls: type[torch.Tensor], name: str, run: Callable[..., Any]) -> None:
    run.__name__, run.__qualname__, run.__doc__ = name, f"{cls.__name__}.{name}", getattr(cls, name).__doc__
    setattr(cls, name, run)


def _given(other: Any, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return rest if other is _MISSING else (other, *rest)


def _unary(base: Callable[..., Any], info: CallInfo) -> Callable[..., Any]:
    def run(self: Any, *rest: Any, **named: Any) -> Any:
        if not (rest or named) and (controller := way(self, self)) is not None:
            plan = PLANS.get((info, self._spec))
            if plan is not None and plan.is_simple:
                return execute_simple(info, plan, (self,), (), controller, _CALLER)
        return base(self, *rest, **named)

    return run


def _binary(base: Callable[..., Any], info: CallInfo, of_number: CallInfo | None) -> Callable[..., Any]:
    def run(self: Any, other: Any = _MISSING, *rest: Any, **named: Any) -> Any:
        kind = type(other)
        if rest or named:
            pass
        elif kind is Tensor:
            if (controller := way(self, other)) is not None:
                plan = PLANS.get((info, self._spec, other._spec))
                if plan is not None and plan.is_simple:
                    return execute_simple(info, plan, (self, other), (), controller, _CALLER)
        elif of_number is not None and (kind is float or (kind is int and other in _SMALL)):
            controller = way(self, self)
            if controller is not None:
                plan = PLANS.get(key_of(of_number, (self, other), {}, [], []))
                if plan is not None and plan.is_simple:
                    return execute_simple(of_number, plan, (self,), (other,), controller, _CALLER)
        return base(self, *_given(other, rest), **named)

    return run


def _reflected(run: Callable[..., Any]) -> Callable[..., Any]:
    def reflected(self: Any, other: Any) -> Any:
        # Python asks a subclass first: ``plain + x`` is for ``plain`` to answer.
        return NotImplemented if isinstance(other, torch.Tensor) else run(self, other)

    return reflected


def _in_place(base: Callable[..., Any], info: CallInfo) -> Callable[..., Any]:
    def run(self: Any, other: Any = _MISSING, *rest: Any, **named: Any) -> Any:
        kind = type(other)
        plan = None
        if rest or named:
            pass
        elif kind is Tensor:
            controller = way(self, other)
            if controller is not None:
                plan, tensors, numbers = PLANS.get((info, self._spec, other._spec)), (self, other), ()
        elif kind is float or (kind is int and other in _SMALL):
            controller = way(self, self)
            if controller is not None:
                plan, tensors, numbers = PLANS.get(key_of(info, (self, other), {}, [], [])), (self,), (other,)
        if (
            plan is not None
            and plan.is_inplace
            and self._value.copy is None
            and not (is_inference_mode_enabled() or self.is_inference())
        ):
            increment_version((self,))
            return execute_inplace(info, plan, tensors, numbers, controller, _CALLER)
        return base(self, *_given(other, rest), **named)

    return run


def way(x: Tensor, y: Tensor) -> Controller | None:
    """Who may be told at once to run an op on these; None if torch, or someone else, has something to do before."""
    if is_grad_enabled() and any_requires_grad(x, y):
        return None
    controller = runtime._controller
    if controller is None or type(x) is not Tensor or is_at_work():
        return None
    if inserted.mode != "allow" or get_default_dtype() is not controller.default_dtype:
        return None
    return controller
