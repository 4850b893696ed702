"""What an op's schema says, read once: which arguments are numbers or sizes, what is written, what aliases what."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..program.effects import HIDDEN_VIEWS, HIDDEN_WRITES
from . import checks
from .rules import STATIC_NUMBERS, rule_for
from .strategy import TensorArg

aten = torch.ops.aten

#: Views that are lazy in torch (a flag on the tensor): what makes their values at once. Kept lazy on the workers, the flag would be
#: unknown to the handle, and ops that refuse flagged tensors would fail there.
LAZY_VIEWS: dict[Any, str] = {
    aten._conj.default: "aten._conj_physical.default",
    aten._neg_view.default: "aten.neg.default",
}

#: Ops that always run as one of our device functions.
ALWAYS_LOCAL: dict[Any, str] = {
    aten.mkldnn_rnn_layer.default: "dtorch.mkldnn_rnn_layer",
    aten.histc.default: "dtorch.histc",
}

#: A tensor argument may be given a number (``x + 1``), which is then an operand like any other.
_NUMBER_KINDS = ("NumberType", "FloatType", "TensorType")


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One schema argument. ``is_number``: its value is an operand; only its Python type and whether it `enlarges` matter to
    planning (not so the `STATIC_NUMBERS` of rules, which are constants).
    ``is_size``: an operand too, but planning depends on it."""

    name: str
    position: int
    is_number: bool
    is_size: bool
    is_write: bool
    kwarg_only: bool
    alias_set: frozenset[str]


class OpInfo:
    """The schema of one op as planning and dispatch need it."""

    def __init__(self, op: torch._ops.OpOverload) -> None:
        schema = op._schema
        self.op = op
        self.name = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
        static = STATIC_NUMBERS.get(op, frozenset())
        self.arguments = tuple(_argument(i, a, a.name in static) for i, a in enumerate(schema.arguments))
        self.by_name = {a.name: a for a in self.arguments}
        self.written = tuple(a for a in self.arguments if a.is_write)
        self.outs = tuple(a for a, x in zip(self.arguments, schema.arguments, strict=True) if x.is_out)
        self.is_mutable = bool(self.written)
        self.hidden = HIDDEN_WRITES.get(op)
        self.positions_of_numbers = tuple(a.is_number for a in self.arguments)
        returns = schema.returns
        single = "list" if returns and _is_list(returns[0].type) else "tensor"
        self.structure = "none" if not returns else "tuple" if len(returns) > 1 else single
        self.return_aliases = tuple(_alias(r, self.arguments) for r in returns)
        if op in HIDDEN_VIEWS:
            self.return_aliases = (self.by_name[HIDDEN_VIEWS[op]],)
        rule = rule_for(op)
        self.is_foreach = schema.name.startswith("aten::_foreach_")
        self.by_form = rule is not None and rule.by_form
        self.by_shards = rule is not None and rule.by_shards
        #: Whether a kernel takes a call without numbers follows from the call's form (`dtorch.sharding.forms`).
        self.is_checked_by_form = self.by_form and op not in checks.SUSPECTS and torch.Tag.inplace not in op.tags
        self.local = ALWAYS_LOCAL.get(op)
        self.physical = LAZY_VIEWS.get(op)
        #: Outputs that are the written input itself, as an in-place op returns it: output index -> argument.
        self.returned = {
            i: alias for i, alias in enumerate(self.return_aliases) if alias is not None and alias.is_write
        }
        self.returned_inputs = frozenset(self.returned)
        #: No result is an input, or a view of one.
        self.makes_fresh = not any(self.return_aliases) and not self.is_mutable
        self.is_view = any(alias is not None for i, alias in enumerate(self.return_aliases) if i not in self.returned)
        #: Made of other ops. silu_backward and two more have a kernel beside the formula, which rounds otherwise.
        self.is_composite = not any(
            _has_kernel(op, key) for key in ("CompositeExplicitAutograd", "CPU")
        ) and _has_kernel(op, "CompositeImplicitAutograd")

    def count_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """How many numbers a call passes as operands."""
        total = 0
        for i, value in enumerate(args):
            if self.arguments[i].is_number:
                total += _count(value)
        for name, value in kwargs.items():
            if self.by_name[name].is_number:
                total += _count(value)
        return total

    def value_of(self, argument: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call passes for ``argument``; None if it leaves it out."""
        if not argument.kwarg_only and argument.position < len(args):
            return args[argument.position]
        return kwargs.get(argument.name)

    def writes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The indices of the tensors a call writes, in order."""
        written: list[int] = []
        for argument in self.arguments_written(args, kwargs):
            written += _indices(self.value_of(argument, args, kwargs))
        return tuple(written)

    def arguments_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Argument, ...]:
        """The arguments a call writes, in order; those, too, of which the schema does not say so."""
        if self.hidden is not None:
            names, flag = self.hidden
            if not flag or self.value_of(self.by_name[flag], args, kwargs):
                return (*self.written, *[self.by_name[name] for name in names])
        return self.written

    def alias_of(self, output: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """The index of the tensor that an output is a view of, or that it is (in-place); None if it is fresh."""
        alias = self.return_aliases[0 if self.structure == "list" else output] if self.return_aliases else None
        if alias is None:
            return None
        indices = _indices(self.value_of(alias, args, kwargs))
        return indices[0] if indices else None


def _argument(position: int, argument: Any, static: bool) -> Argument:
    kind = _kind(argument.real_type)
    alias = argument.alias_info
    return Argument(
        argument.name,
        position,
        kind in _NUMBER_KINDS and not static,
        kind == "SymIntType",
        alias is not None and alias.is_write,
        argument.kwarg_only,
        frozenset() if alias is None else frozenset(alias.before_set | alias.after_set),
    )


def _kind(kind: Any) -> str:
    """The schema type inside optionals and lists."""
    while isinstance(kind, (torch.OptionalType, torch.ListType)):
        kind = kind.getElementType()
    return kind.kind()


def _returned_aliases(returned: Any) -> frozenset[str]:
    """The alias sets of one return; a list of views (``split``) has "*", as its argument has."""
    if returned.alias_info is None:
        return frozenset()
    sets = frozenset(returned.alias_info.before_set | returned.alias_info.after_set)
    return sets or frozenset("*")


def _alias(returned: Any, arguments: tuple[Argument, ...]) -> Argument | None:
    sets = _returned_aliases(returned)
    return next((a for a in arguments if a.alias_set & sets), None)


def _has_kernel(op: torch._ops.OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _is_list(kind: Any) -> bool:
    return isinstance(kind, torch.ListType)


def _count(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(_count(item) for item in value)
    return 0 if value is None or type(value) is complex or isinstance(value, TensorArg) else 1


def _indices(value: Any) -> list[int]:
    if isinstance(value, TensorArg):
        return [value.index]
    if isinstance(value, (list, tuple)):
        return [index for item in value for index in _indices(item)]
    return []
