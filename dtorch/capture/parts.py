"""What a captured call is described by, and what one run of it is put together of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..client.values import Root, Value
from ..sharding.spec import Spec
from . import plain, reads
from .outside import Edge

if TYPE_CHECKING:
    from .captured import Captured


@dataclasses.dataclass(slots=True)
class Output:
    """One handle that a call makes: on value ``value`` of the program, or, if that is None, on what handle ``base`` refers to.

    ``base``: the handle whose memory it is a view of; ``sharer``: the earlier output that has the same memory.
    """

    spec: Spec
    value: int | None
    base: int | None = None
    sharer: int | None = None


@dataclasses.dataclass(slots=True)
class Binding:
    """After the call, output ``output`` (none: None) is at ``edge``."""

    edge: Edge
    output: int | None


@dataclasses.dataclass(slots=True)
class Stage:
    """What a call does up to a value that it reads, or to its end: the client's own part, then so many programs."""

    items: list[Any]
    programs: int
    read: reads.Read | None = None


class Call:
    """One run of a captured program, while it is put together."""

    __slots__ = (
        "captured", "tensors", "numbers", "values", "env", "handles", "returned", "undo", "pool", "made", "roots", "programs",
    )  # fmt: skip

    def __init__(self, captured: Captured, tensors: list[torch.Tensor]) -> None:
        self.captured = captured
        self.tensors = tensors
        self.numbers = list(captured.numbers)
        self.values: dict[int, Value] = {}
        self.env: dict[int, torch.Tensor] = {}
        self.handles: list[Any] = []
        #: What the result has of `Captured.returned`, as it was before the call.
        self.returned: list[Any] = []
        #: Numbers of values: of the handles, the constants, the tensors that were sent, and of those made by the programs so far.
        self.pool: list[int] = []
        self.made: list[Value] = []
        #: Memory that several of these share.
        self.roots: dict[int, Root] = {}
        #: How many programs have been queued.
        self.programs = 0
        #: What makes undone what the call has changed on the client: functions, each with the state to be given.
        self.undo: list[tuple[Callable[[Any], Any], torch.Tensor]] = []

    def plain(self, node: plain.Node) -> torch.Tensor:
        return plain.window(node, self.env)
