"""A captured call that does nothing on the client but check, queue its programs and wrap their results, as straight-line code.

What is known when it is recorded is in the code: which handles are arguments, which value shares whose memory, what is wrapped. What the
handles from outside are changes rarely: they, and the commands but for what is new in every call, are kept until one is rebound.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from ..client import aliasing, handles, runtime, torch_internals
from ..client.handles import wrap, wrap_view
from ..client.values import Value, new_value, next_value_id
from ..interrupts import critical
from .plain import Mismatch

#: In this package, so that no user's line is in it.
FILENAME = os.path.join(os.path.dirname(__file__), "<captured call>")
#: Frames between `History.note` and who calls the compiled function: `Controller.issue`, ``issue``, `_queue`, ``run``, `Captured.run`,
#: `Alike.run` and `Compiled.__call__`.
DEPTH = 8


def is_straight(captured: Any) -> bool:
    """Whether such a call does no more than that."""
    return not (
        captured.items
        or captured.puts
        or captured.starts
        or captured.reads
        or captured.moving
        or captured.bindings
        or captured.rebound
        or captured.released
        or captured.gradient is not None
    )


class Straight:
    """The code of one captured call, and what it keeps from call to call. It does not refer to the `Captured` that has it."""

    __slots__ = ("known", "check", "_run")

    def __init__(self, captured: Any) -> None:
        #: `handles.version` when the rest was found; the handles from outside; the numbers of their values; a command for each program,
        #: with 0 for the numbers that differ from call to call. One object: threads may share it.
        self.known: tuple[Any, list[Any], list[int], list[list[Any]]] = (None, [], [], [])
        #: ``check(self, captured, tensors)``: whether the call may be run; or `Mismatch`.
        self.check: Callable[..., None]
        self._run: Callable[..., Any]
        self.check, self._run = _Writer(captured).write()

    def renew(self, captured: Any) -> tuple[Any, list[Any], list[int], list[list[Any]]]:
        """Find what is known anew; or `Mismatch`."""
        version = handles.version
        fixed, ids = captured.handles_outside()
        count = len(captured.leaves)
        if any(a >= count and ids[a - count] != ids[b - count] for a, b in captured.twins):
            raise Mismatch
        pool = [*[0] * count, *ids, *[value.id for value in captured.constants]]
        pool += [0] * sum(len(segment.outputs) for segment in captured.segments)
        commands = []
        for program, sources, segment in zip(captured.programs, captured.sources, captured.segments, strict=True):
            command = [program, *[pool[i] for i in sources], *[0] * len(segment.outputs)]
            commands.append(command + [captured.numbers[i] for i in segment.numbers])
        self.known = version, fixed, ids, commands
        return self.known

    def run(self, captured: Any, tensors: list[torch.Tensor]) -> Any:
        """What `Captured.run` is."""
        return self._run(self, captured, tensors)


@critical
def _queue(issue: Callable[..., list[Value]], controller: Any, *found: Any) -> list[Value]:
    with controller.lock:
        return issue(controller, *found)


class _Writer:
    """Writes what `Straight` runs. Argument ``i`` among the handles is ``h{i}``, its value ``v{i}``; ``m{i}`` are values that are made."""

    def __init__(self, captured: Any) -> None:
        self.captured = captured
        self.count = len(captured.leaves)
        self.bound: dict[str, Any] = {
            "name": captured.name, "guards": captured.guards, "result": captured.result, "handles": handles, "runtime": runtime,
            "Mismatch": Mismatch, "Value": Value, "new_value": new_value, "next_id": next_value_id, "written": aliasing.written,
            "queue": _queue, "wrap": wrap, "wrap_view": wrap_view, "is_inference": torch.is_inference_mode_enabled,
            "increment": torch.autograd.graph.increment_version, "past_functions": torch_internals.past_functions,
            "requires_grad": torch._C.TensorBase.requires_grad.__get__,  # type: ignore[attr-defined]
        }  # fmt: skip

    def write(self) -> list[Callable[..., Any]]:
        checks = self.checks()
        source = [*self.issue(), "def check(kept, captured, tensors):", *checks]
        source += ["def run(kept, captured, tensors, issue=issue):", *checks, *self.rest()]
        exec(compile("\n".join(source), FILENAME, "exec"), self.bound)
        del self.bound["issue"]  # else each would refer to itself
        return [self.bound.pop("check"), self.bound.pop("run")]

    def bind(self, value: Any) -> str:
        name = f"k{len(self.bound)}"
        self.bound[name] = value
        return name

    def handle(self, at: int) -> str:
        """A handle that the programs read."""
        return f"h{at}" if at < self.count else f"fixed[{at - self.count}]"

    def value(self, at: int) -> str:
        return f"v{at}" if at < self.count else f"fixed[{at - self.count}]._value"

    def arguments(self) -> list[str]:
        return [f"v{i}" for i in range(self.count)]

    def issue(self) -> list[str]:
        """The function that queues the programs."""
        captured = self.captured
        lines = [f"def issue({', '.join(['controller', 'fixed', 'commands', *self.arguments()])}):"]
        first_made = self.count + len(captured.fixed) + len(captured.constants)
        firsts: dict[int, str] = {}
        made = 0
        for index, (sources, segment) in enumerate(zip(captured.sources, captured.segments, strict=True)):
            lines.append(f"    c = commands[{index}].copy()")
            for position, at in enumerate(sources, 1):
                if at < self.count:
                    lines.append(f"    c[{position}] = v{at}.id")
                elif at >= first_made:
                    lines.append(f"    c[{position}] = m{at - first_made}.id")
            for position in range(1 + len(sources), 1 + len(sources) + len(segment.outputs)):
                base, group = captured.made[made]
                root = None
                if base is not None:
                    root = f"{self.value(base)}.root"
                elif group is not None:
                    root = f"{firsts[group]}.root" if group in firsts else None
                    firsts.setdefault(group, f"m{made}")
                fresh = "new_value()" if root is None else f"Value(next_id(), {root})"
                lines += [f"    m{made} = {fresh}", f"    c[{position}] = m{made}.id"]
                made += 1
            lines.append(f"    controller.issue(c, name, {DEPTH})")
        lines += [f"    written(controller, {self.value(at)})" for at in captured.written]
        lines.append(f"    return [{', '.join(f'm{i}' for i in range(made))}]")
        return lines

    def checks(self) -> list[str]:
        captured = self.captured
        lines = [
            "    guards.find(tensors)",
            "    version, fixed, ids, commands = kept.known",
            "    if version is not handles.version or guards.loose: version, fixed, ids, commands = kept.renew(captured)",
        ]
        for at, index in enumerate(captured.leaves):
            lines += [f"    h{at} = tensors[{index}]", f"    v{at} = h{at}._value"]
        wrong = [f"{self.number(a)} != {self.number(b)}" for a, b in captured.twins if a < self.count]
        if wrong:
            lines.append(f"    if {' or '.join(wrong)}: raise Mismatch")
        copies = [f"{value}.copy is not None" for value in self.arguments()]
        if copies:
            given = ", ".join([f"h{at}" for at in range(self.count)])
            lines.append(f"    if {' or '.join(copies)}: captured.refresh([{given}, *fixed])")
        if captured.checks_grad and captured.fixed:  # arguments are alike in this, too
            lines += [
                "    with past_functions():",
                f"        if list(map(requires_grad, fixed)) != {captured.requires_grad[self.count :]}: raise Mismatch",
            ]
        return lines

    def rest(self) -> list[str]:
        captured = self.captured
        returned = ", ".join(f"{self.bind(edge)}.get()" for edge in captured.returned)
        lines = [
            f"    returned = [{returned}]",
            "    controller = runtime._controller",
            f"    made = queue({', '.join(['issue', 'controller', 'fixed', 'commands', *self.arguments()])})",
        ]
        if captured.written:
            written = ", ".join(map(self.handle, captured.written))
            lines.append(f"    if not is_inference(): increment([{written}])")
        for at, output in enumerate(captured.outputs):
            base = output.base
            value = f"made[{output.value}]" if output.value is not None else self.value(base)
            if base is not None:
                wrapped = f"wrap_view({self.bind(output.spec)}, {value}, {self.handle(base)})"
            elif output.sharer is not None:
                wrapped = f"wrap_view({self.bind(output.spec)}, {value}, o{output.sharer})"
            else:
                wrapped = f"wrap({self.bind(output.spec)}, {value})"
            lines.append(f"    o{at} = {wrapped}")
        outputs = ", ".join(f"o{at}" for at in range(len(captured.outputs)))
        lines += [
            f"    found = result([{outputs}], tensors, returned, None)",
            "    captured.pace(controller)",
            "    return found",
        ]
        return lines

    def number(self, at: int) -> str:
        return f"v{at}.id" if at < self.count else f"ids[{at - self.count}]"
