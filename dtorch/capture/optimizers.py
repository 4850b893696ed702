"""An optimizer's step inside of a captured function.

Learning rates, step counts and the like are numbers of Python that change between calls, often by a scheduler outside. So at every call
the optimizer's own code runs, but for its work on our tensors: calls of torch's functions with these are not made, they are matched with
the recorded ones, and their numbers go into the program. Whatever arithmetic the optimizer does on the way is right by construction.

That is half of a small step's time, for each parameter is asked for much. So an optimizer without state, all of whose settings are the
objects that they were at the last call, is not asked again: `Asked`.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from ..client import torch_internals, watch
from ..client.handles import wrap
from ..tensor import Tensor
from .outside import grad_of
from .plain import PLAIN, Mismatch

#: Optimizers whose steps have been compared with plain torch's, captured (`tests/compile/test_optimizers.py`).
KNOWN = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop,
    }
)  # fmt: skip


#: Types of settings that are what they were if they are the same object.
_UNCHANGING = frozenset({float, int, bool, str, type(None)})


def is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int


@dataclasses.dataclass(slots=True)
class StepCall:
    """One call of a function of torch's on our tensors, in an optimizer's step.

    ``numbers`` are its numbers in order. ``slots``: for some of these, which number of the captured call they are; what is not among
    them has to be the same every time.
    """

    func: Any
    numbers: list[Any]
    result: Any
    slots: dict[int, int] = dataclasses.field(default_factory=dict)


class Asked:
    """All that a step of an optimizer without state can depend on, as it was, and the numbers that it gave."""

    def __init__(self, optimizer: torch.optim.Optimizer, numbers: dict[int, Any]) -> None:
        self.numbers = numbers
        self._class = type(optimizer)
        self._step = type(optimizer).step
        self._names = set(vars(optimizer))
        self._groups = [(list(group), list(group.values()), list(group["params"])) for group in optimizer.param_groups]

    @staticmethod
    def is_possible(optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has no state, no settings that change in place, and nobody sees its steps, as a scheduler does."""
        return not (
            optimizer.state
            or vars(optimizer).keys() & {"step", "grad_scale", "found_inf"}
            or any(
                name != "params" and type(value) not in _UNCHANGING
                for group in optimizer.param_groups
                for name, value in group.items()
            )
        )

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the next step gives the same numbers, and does nothing else."""
        groups = optimizer.param_groups
        if (
            optimizer.state
            or type(optimizer) is not self._class
            or self._class.step is not self._step
            or vars(optimizer).keys() != self._names
            or len(groups) != len(self._groups)
            or _is_watched(optimizer)
        ):
            return False
        for group, (names, values, params) in zip(groups, self._groups, strict=True):
            now = group["params"]
            if list(group) != names or len(now) != len(params):
                return False
            if not all(map(operator.is_, group.values(), values)) or not all(map(operator.is_, now, params)):
                return False
        return True


class Section:
    """One optimizer's step."""

    def __init__(self, recorder: Any, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        self._recorder = recorder
        self.optimizer = optimizer
        self.calls: list[StepCall] = []
        self.asked: Asked | None = None
        self.grads = [(p, _gradient_like(p)) for group in optimizer.param_groups for p in group["params"]]
        self.settings = settings_of(optimizer)
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            recorder.refuse("an optimizer is given a closure")
        if type(optimizer) not in KNOWN:
            recorder.refuse(f"the steps of {type(optimizer).__name__} are not known to be captured right")
        if any(isinstance(v, torch.Tensor) for group in optimizer.param_groups for v in group.values()):
            recorder.refuse("a setting of an optimizer is a tensor")

    # -- while recording

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call of a function in the step, and note it if it works on our tensors."""
        recorder = self._recorder
        if not _is_ours(args, kwargs) or func.__name__ == "__get__":
            return func(*args, **kwargs)
        if func.__name__ == "__set__":
            recorder.refuse("an optimizer sets an attribute of a tensor")
        start = len(recorder.commands)
        result = func(*args, **kwargs)
        noted = StepCall(func, numbers_in((args, kwargs)), self._hollow(result))
        self._match(noted, recorder.commands[start:])
        self.calls.append(noted)
        return result

    def _hollow(self, value: Any) -> Any:
        """What another call's optimizer is given in place of a result: handles on nothing, where it was made here."""
        if isinstance(value, Tensor):
            if value._spec is None or value._value.id < self._recorder.floor:
                return value
            return wrap(value._spec, None)  # type: ignore[arg-type]
        if isinstance(value, (list, tuple)):
            return type(value)([self._hollow(item) for item in value])
        return value

    def _match(self, noted: StepCall, commands: list[Any]) -> None:
        """Find which operands of the commands the numbers of the call are."""
        recorder = self._recorder
        places: dict[Any, list[tuple[Any, int]]] = {}
        for command in commands:
            for index, value in enumerate(command.operands):
                if is_number(value) and index not in command.varying:
                    places.setdefault(_key(value), []).append((command, index))
        givers: dict[Any, list[int]] = {}
        for position, value in enumerate(noted.numbers):
            givers.setdefault(_key(value), []).append(position)
        for key, positions in givers.items():
            found = places.get(key, [])
            if not found:
                continue
            if len(found) % len(positions):
                continue  # which is which? They have to stay what they are
            for at, (command, index) in enumerate(found):
                position = positions[at % len(positions)]
                if position not in noted.slots:
                    noted.slots[position] = recorder.number(noted.numbers[position])
                command.varying[index] = noted.slots[position]

    def end(self) -> None:
        self._recorder = None

    # -- in another call

    def run(self, call: Any) -> None:
        """Have the optimizer work out this call's numbers."""
        optimizer = self.optimizer
        asked = self.asked
        if asked is not None and asked.holds(optimizer):
            for slot, number in asked.numbers.items():
                call.numbers[slot] = number
            return
        if not _alike(self.settings, settings_of(optimizer)):
            raise Mismatch
        call.undo += [
            (tensor.copy_, tensor.clone())
            for state in optimizer.state.values()
            for tensor in state.values()
            if type(tensor) in PLAIN
        ]
        swapped = []
        for parameter, like in self.grads:
            grad = grad_of(parameter)
            if (grad is None) != (like is None):
                swapped.append((parameter, grad))
                torch_internals.set_grad(parameter, like)
        again = _Again(self, call)
        try:
            with again:
                optimizer.step()
            if again.at != len(self.calls):
                raise Mismatch
        finally:
            for parameter, grad in swapped:
                torch_internals.set_grad(parameter, grad)
        self.asked = None
        if Asked.is_possible(optimizer):
            slots = [slot for noted in self.calls for slot in noted.slots.values()]
            self.asked = Asked(optimizer, {slot: call.numbers[slot] for slot in slots})


class _Again(TorchFunctionMode):
    """Answers calls on our tensors with what was recorded, and takes their numbers."""

    def __init__(self, section: Section, call: Any) -> None:
        super().__init__()
        self._section = section
        self._numbers = call.numbers
        self.at = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_ours(args, kwargs) or func.__name__ == "__get__":
            return func(*args, **kwargs)
        calls = self._section.calls
        if self.at >= len(calls):
            raise Mismatch
        expected = calls[self.at]
        self.at += 1
        numbers = numbers_in((args, kwargs))
        if func is not expected.func or len(numbers) != len(expected.numbers):
            raise Mismatch
        slots = expected.slots
        for position, value in enumerate(numbers):
            was = expected.numbers[position]
            slot = slots.get(position)
            if slot is None:
                if value != was:
                    raise Mismatch
                continue
            # A number that enlarges may not scale a pending sum: that is another plan.
            if type(value) is not type(was) or (-1 <= value <= 1) != (-1 <= was <= 1):
                raise Mismatch
            self._numbers[slot] = value
        return expected.result


def _key(value: Any) -> Any:
    return type(value), value


def _is_ours(args: Any, kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:
            return True
        if isinstance(value, (list, tuple)) and value and type(value[0]) is Tensor:
            return True
    return False


def numbers_in(value: Any) -> list[Any]:
    """The numbers in nested arguments, in order."""
    if is_number(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [n for item in value for n in numbers_in(item)]
    return [n for item in value.values() for n in numbers_in(item)] if isinstance(value, dict) else []


def _gradient_like(parameter: Any) -> Any:
    """A handle on nothing, of the kind of the parameter's gradient, if it has one."""
    grad = grad_of(parameter)
    return None if type(grad) is not Tensor or grad._spec is None else wrap(grad._spec, None)  # type: ignore[arg-type]


def settings_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The settings of each group."""
    return [[(name, value) for name, value in group.items() if name != "params"] for group in optimizer.param_groups]


def _alike(before: list[Any], now: list[Any]) -> bool:
    """Whether an optimizer would go the same way by both settings: numbers may differ, but not in whether they are 0."""
    if len(before) != len(now):
        return False
    for one, other in zip(before, now, strict=True):
        if len(one) != len(other):
            return False
        for (name, was), (same_name, value) in zip(one, other, strict=True):
            if name != same_name or type(was) is not type(value):
                return False
            if is_number(value):
                if (value == 0) != (was == 0):
                    return False
            elif isinstance(value, torch.Tensor):
                if value is not was:
                    return False
            elif isinstance(value, tuple):
                if [n == 0 for n in numbers_in(value)] != [n == 0 for n in numbers_in(was)]:
                    return False
            elif value != was:
                return False
    return True


def _begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    recorder = watch.recorder()
    if recorder is not None and recorder.section is None:
        recorder.section = Section(recorder, optimizer, args, kwargs)
        recorder.items.append(recorder.section)
        recorder.sections.append(recorder.section)


def _ends(optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    recorder = watch.recorder()
    if recorder is not None and recorder.section is not None:
        recorder.section.end()
        recorder.section = None


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody else has hooks on its steps."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks.keys() != {_BEGINS}
        or torch_optimizer._global_optimizer_post_hooks.keys() != {_ENDS}
    )


_BEGINS = register_optimizer_step_pre_hook(_begins).id
_ENDS = register_optimizer_step_post_hook(_ends).id
