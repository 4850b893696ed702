"""What a sharding rule is: the legal placements of one op along one mesh axis.

A rule is a small pure function from a `Call` to a list of `Strategy`, each of which is right for any number of devices on
the axis, uneven and empty shards included, whatever the other axes do. "Everything replicated" is always legal and need not
be listed. An op without a rule has only that: it is gathered and run replicated. `choose` picks one strategy per axis by cost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..placement import REPLICATE, Placement

#: A value that nobody changes: not frozen, for that makes it four times as slow to make, and a plan makes a dozen.
value = functools.partial(dataclasses.dataclass, slots=True, unsafe_hash=True)


@value
class TensorArg:
    """A tensor in a call, as a rule sees it: global shape, stride and dtype; ``index`` counts the call's tensors in order."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@value
class Call:
    """One call of an op: ``args`` and ``kwargs`` with a `TensorArg` for every tensor; ``inputs`` are those, in order.

    Every schema argument is reachable by name through `get`, defaults included.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[TensorArg, ...]
    outputs: tuple[TensorArg | None, ...]

    def get(self, name: str) -> Any:
        for position, (own, default, kwarg_only) in enumerate(schema_arguments(self.op)):
            if own == name:
                if position < len(self.args) and not kwarg_only:
                    return self.args[position]
                return self.kwargs.get(name, default)
        raise KeyError(f"{self.op} has no argument {name!r}")

    def names(self) -> list[str]:
        """The argument that each input tensor belongs to."""
        found = [""] * len(self.inputs)
        passed = [(argument[0], value) for argument, value in zip(schema_arguments(self.op), self.args, strict=False)]
        for name, value in (*passed, *self.kwargs.items()):
            if type(value) is TensorArg:
                found[value.index] = name
            elif type(value) in (list, tuple):
                for item in value:
                    if type(item) is TensorArg:
                        found[item.index] = name
        return found


@functools.cache
def schema_arguments(op: torch._ops.OpOverload) -> tuple[tuple[str, Any, bool], ...]:
    """(name, default, keyword only) of each argument; the schema itself builds them anew at every look."""
    return tuple((a.name, a.default_value, a.kwarg_only) for a in op._schema.arguments)


@value
class Strategy:
    """Placements of every input tensor and every output along one axis.

    Args:
        inputs: one per input tensor, in order.
        outputs: one per output, in order (None for outputs that are not tensors). A reduction other than ``sum`` may stand
            here; it is completed before the plan ends.
        even: a size that the number of pieces of the sharded dim (all axes together) must divide; None if any will do.
        nonempty: the kernel rejects an empty shard, so no device may hold one.
        local: a device function (`dtorch.worker.functions`) or op (``aten.…``) to run in place of the op, with the same
            arguments; None for the op itself. It runs for all axes at once, so it must also be right for every other strategy
            of its rule that another axis may pick.
        finish: a device function run on the reduced outputs (they are brought from Partial to Replicate first); it takes the
            outputs, then the op's arguments that are not tensors, and returns the final outputs.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    even: int | None = None
    nonempty: bool = False
    local: str | None = None
    finish: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Inputs and outputs of a list op that are placed without regard to the others: one index of its lists.

    ``strategies`` speak of the group's own ``inputs`` and ``outputs``, in that order. A rule that returns groups returns
    nothing else; an input in no group is replicated.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    strategies: tuple[Strategy, ...]


Rule = Callable[[Call], Iterable[Strategy] | Iterable[Group]]


@dataclasses.dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule and how the op's own arguments become local.

    ``local_shapes`` names the arguments that hold a shape, each with the output whose local shape replaces it. ``by_form``: of the
    tensors' sizes the rule asks only which are equal, 0 or 1, see `dtorch.sharding.forms`; ``by_shards``: and those of dims that a
    strategy shards, as ``even`` and ``nonempty`` do.
    """

    rule: Rule
    local_shapes: dict[str, int]
    by_form: bool = False
    by_shards: bool = False


RULES: dict[Any, RuleEntry] = {}


def rule(
    *ops: Any, local_shapes: dict[str, int] | None = None, by_form: bool = False, by_shards: bool = False
) -> Callable[[Rule], Rule]:
    """Register a rule for ``ops`` (OpOverloads), as `RuleEntry` describes; a second rule for one op is an error."""

    def register(function: Rule) -> Rule:
        for op in ops:
            if op in RULES:
                raise ValueError(f"{op} has a rule already")
            RULES[op] = RuleEntry(function, local_shapes or {}, by_form or by_shards, by_shards)
        return function

    return register


def enlarges(number: bool | complex) -> bool:
    """Whether multiplying by ``number`` may make finite values larger, or not a number.

    All that a rule may ask of a number that is not among its `STATIC_NUMBERS`: a plan serves every number that answers alike.
    """
    return not abs(number) <= 1


def everywhere(placement: Placement, call: Call) -> Strategy:
    """``placement`` for every input and output."""
    return Strategy((placement,) * len(call.inputs), tuple(None if o is None else placement for o in call.outputs))


def named(call: Call, outputs: Iterable[Placement | None], **placements: Placement) -> Strategy:
    """A strategy by argument names; what is not named is replicated, and outputs that are no tensors stay None."""
    inputs = tuple([placements.get(name, REPLICATE) for name in call.names()])
    return Strategy(inputs, tuple([None if o is None else p for o, p in zip(call.outputs, outputs, strict=True)]))
