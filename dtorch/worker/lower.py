"""Lowering: a `Program` becomes one straight-line Python function that works on a device's store.

Two steps. `generate` writes the source, which is the same for all devices that hold the same of the program's meshes.
`bind` runs it in a namespace of its own for one device, where planners and local shapes know its coordinate.
(One namespace shared by many functions once ran the wrong program without a word.)
"""

from __future__ import annotations

import dataclasses
import functools
import keyword
from collections.abc import Callable, Collection, Mapping
from types import CodeType
from typing import Any

import torch

from ..program.ir import (
    Const,
    Fused,
    Local,
    LocalShape,
    Op,
    Operand,
    Program,
    Rearrange,
    Reshard,
    ReshardDone,
    ReshardStart,
    ShiftDone,
    ShiftStart,
    Slot,
    outs_of,
    slots_of,
)
from . import bindings, fused, products
from .bindings import Maker, Site, same
from .operators import BUILTINS, resolve
from .restride import restride, restride_if_tensor

#: The file name of generated code in tracebacks.
FILENAME = "<dtorch program>"

Held = Mapping[int, bool]
"""For each mesh of a program, whether it holds the device."""
Function = Callable[[dict, list], Any]
"""``p(values, command)``: runs a program; a generator (`executor.Steps`) where the device takes part in a Reshard."""


@dataclasses.dataclass(frozen=True, slots=True)
class Code:
    """The generated function of a program, not yet bound to a device.

    ``lines[n]`` is the index in the body of the instruction that line ``n`` of the source comes from. ``everywhere``:
    binding makes the same for every device.
    """

    program: Program
    source: str
    code: CodeType
    lines: tuple[int, ...]
    makers: Mapping[str, Maker]
    everywhere: bool


def generate(program: Program, held: Held, restrides: Collection[tuple[int, int]] | None) -> Code:
    """Write the function of ``program``.

    Args:
        restrides: (instruction, out) pairs whose results are copied into the order that the program states; None to show
            every such result to ``probe`` (`bind`), as in the first run.

    Raises:
        ValueError: an op, device function or constant that does not exist or is not allowed.
    """
    return _Writer(program, held, restrides).write()


def bind(code: Code, site: Site, probe: Callable[..., torch.Tensor] | None = None) -> Function:
    """The function of ``code`` for one device."""
    namespace: dict[str, Any] = {name: maker.make(site) for name, maker in code.makers.items()}
    namespace["probe"] = probe
    exec(code.code, namespace)
    return namespace["p"]


class _Writer:
    """Writes one `Code`."""

    def __init__(self, program: Program, held: Held, restrides: Collection[tuple[int, int]] | None) -> None:
        self.program = program
        self.held = held
        self.restrides = restrides
        self.makers: dict[str, Maker] = {}
        self.source = ["def p(v, c):"]
        self.lines = [0, 0]  # lines count from 1
        self.slots: set[int] = set()
        self.moved_away: frozenset[int] = frozenset()

    def write(self) -> Code:
        program = self.program
        last_use = _last_uses(program)
        self.moved_away = products.moved_away(program)
        for index, instruction in enumerate(program.body):
            if isinstance(instruction, (Reshard, ReshardDone, Rearrange)):
                self.reshard(index, instruction)
            elif isinstance(instruction, ReshardStart):
                self.start(index, instruction)
            elif isinstance(instruction, (ShiftStart, ShiftDone)):
                self.shift(index, instruction)
            elif self.held[program.mesh]:
                if isinstance(instruction, Fused):
                    self.fused(index, instruction)
                else:
                    self.call(index, instruction)
            dead = [f"s{slot}" for slot in last_use.get(index, ()) if slot in self.slots]
            if dead:
                self.line(index, "del " + ", ".join(dead))
        for position in present_outputs(program, self.held):
            slot = program.outputs[position - 1 - program.inputs]
            self.line(len(program.body) - 1, f"v[c[{position}]] = {self.slot(slot)}")
        if len(self.source) == 1:
            self.line(0, "pass")
        source = "\n".join(self.source) + "\n"
        return Code(
            program=program,
            source=source,
            code=_compile(source),
            lines=tuple(self.lines),
            makers=self.makers,
            everywhere=all(maker.everywhere for maker in self.makers.values()),
        )

    def line(self, index: int, text: str, depth: int = 1) -> None:
        self.source.append("    " * depth + text)
        self.lines.append(index)

    # Expressions

    def slot(self, slot: int) -> str:
        return f"v[c[{1 + slot}]]" if slot < self.program.inputs else f"s{slot}"

    def operand(self, operand: Operand) -> str:
        if operand.index >= self.program.operands:
            return self.bind("k", same(self.program.constant(operand)))
        return f"c[{operand_position(self.program, operand)}]"

    def bind(self, prefix: str, make: Maker) -> str:
        name = f"{prefix}{len(self.makers)}"
        self.makers[name] = make
        return name

    def argument(self, arg: Any) -> str:
        if isinstance(arg, Slot):
            return self.slot(arg.index)
        if isinstance(arg, Operand):
            return self.operand(arg)
        if isinstance(arg, list):
            return "[" + ", ".join(map(self.argument, arg)) + "]"
        if isinstance(arg, Const):
            return self.bind("k", bindings.constant(arg))
        if isinstance(arg, LocalShape):
            return f"{self.bind('l', bindings.local_shape_of(self.program, arg))}(tuple({self.operand(arg.shape)}))"
        if arg is None or isinstance(arg, (bool, int, str)):
            return repr(arg)
        return self.bind("k", same(float(arg)))  # inf and nan have no literal

    def arguments(self, call: Op | Local) -> str:
        parts = [self.argument(arg) for arg in call.args]
        for name, arg in call.kwargs.items():
            plain = name.isidentifier() and not keyword.iskeyword(name)
            value = self.argument(arg)
            parts.append(f"{name}={value}" if plain else f"**{{{name!r}: {value}}}")
        return ", ".join(parts)

    # Instructions

    def call(self, index: int, call: Op | Local) -> None:
        inputs = ", ".join(self.slot(slot) for slot in slots_of(call))
        if isinstance(call, Op):
            op = resolve(call.name)
            plain = BUILTINS.get(call.name, op)
            where_read = index in self.moved_away
            function = self.bind("f", bindings.product_of(call.name, plain) if where_read else same(plain))
            result = f"{function}({self.arguments(call)})"
            paths = _tensor_paths(op, len(call.outs))
        else:
            function = self.bind("f", bindings.device_function_called(call.name))
            make_here = self.bind(
                "h", bindings.here_of(self.program, call, functools.partial(operand_position, self.program))
            )
            here = f"{make_here}(c, [{inputs}])"
            arguments = ", ".join(filter(None, (here, self.arguments(call))))
            result = f"{self.bind('t', same(bindings.tensors))}({function}({arguments}))"
            paths = [f"[{n}]" for n in range(len(call.outs))]
        kept = [(out, slot) for out, slot in enumerate(call.outs) if slot >= 0]
        if not kept:
            self.line(index, result)
        elif paths == [""]:
            self.line(index, f"s{call.outs[0]} = {result}")
        else:
            if paths is None:
                result = f"{self.bind('t', same(bindings.flatten))}({result})"
                paths = [f"[{n}]" for n in range(len(call.outs))]
            self.line(index, f"r = {result}")
            for out, slot in kept:
                self.line(index, f"s{slot} = r{paths[out]}")
            self.line(index, "del r")
        self.slots.update(slot for _, slot in kept)
        if isinstance(call, Op):
            self.orders(index, call, inputs)

    def fused(self, index: int, instruction: Fused) -> None:
        function = self.bind("f", fused.function_of(self.program, instruction))
        inputs, outs = map(self.slot, instruction.inputs), map(self.slot, instruction.outs)
        self.line(index, f"{', '.join(outs)}, = {function}({', '.join(inputs)})")
        self.slots.update(instruction.outs)

    def orders(self, index: int, call: Op, inputs: str) -> None:
        for out, (slot, order) in enumerate(zip(call.outs, call.orders, strict=False)):
            if slot < 0 or order is None or len(order) < 2:
                continue
            if self.restrides is None:
                self.line(index, f"s{slot} = probe({index}, {out}, s{slot}, {order!r}, [{inputs}])")
            elif (index, out) in self.restrides:
                self.line(index, f"s{slot} = {self.restrided(f's{slot}', order)}")

    def restrided(self, name: str, order: list[int]) -> str:
        if order == sorted(order):
            return f"{name}.contiguous()"
        return f"{self.bind('t', same(restride))}({name}, {order!r})"

    def start(self, index: int, half: ReshardStart) -> None:
        if self.held[half.source_mesh]:
            plan = self.bind("t", bindings.planner_of(half))
            self.line(index, f"x = {self.slot(half.move.source)}")
            self.line(index, f"for t in {plan}(tuple({self.operand(half.shape)})):")
            self.line(index, "yield t, x", depth=2)
            self.line(index, "x = None")

    def reshard(self, index: int, move: Reshard | ReshardDone | Rearrange) -> None:
        if not takes_part(move, self.held):
            return
        sends, receives = self.held[move.source_mesh], self.held[move.target_mesh]
        plan, alone = self.bind("t", bindings.planner_of(move)), self.bind("t", bindings.ALONE)
        move = move.move if isinstance(move, ReshardDone) else move
        self.line(index, f"x = {self.slot(move.source) if sends else None}")
        self.line(index, f"for t in {plan}(tuple({self.operand(move.shape)})):")
        self.line(index, f"x = (yield t, x) if len(t.group) > 1 else {alone}(t, x)", depth=2)
        if receives:
            if move.order is not None and move.order != sorted(move.order):
                self.line(index, f"x = {self.bind('t', same(restride_if_tensor))}(x, {move.order!r})")
            self.line(index, f"s{move.out} = x")
            self.slots.add(move.out)
        self.line(index, "x = None")

    def shift(self, index: int, hop: ShiftStart | ShiftDone) -> None:
        if not takes_part(hop, self.held):
            return
        starts = isinstance(hop, ShiftStart)
        self.line(index, f"x = {self.slot(hop.source) if starts else None}")
        self.line(index, f"t = {self.bind('t', bindings.shift_of(hop))}")
        self.line(index, "x = yield t, x")
        if not starts:
            self.line(index, f"s{hop.out} = x")
            self.slots.add(hop.out)
        self.line(index, "t = x = None")


@functools.lru_cache(maxsize=4096)
def _compile(source: str) -> CodeType:
    return compile(source, FILENAME, "exec")


def takes_part(move: Reshard | ReshardStart | Rearrange | ShiftStart | ShiftDone, held: Held) -> bool:
    """Whether the device sends or receives in ``move``."""
    if isinstance(move, (ShiftStart, ShiftDone)):
        return held[move.mesh]
    return held[move.source_mesh] or held[move.target_mesh]


def present_outputs(program: Program, held: Held) -> list[int]:
    """The outputs that the device holds, as positions in the command of a run."""
    holds = dict.fromkeys(range(program.inputs), held[program.mesh])
    for instruction in program.body:
        if isinstance(instruction, (Reshard, ReshardStart, Rearrange)):
            holds.update(dict.fromkeys(outs_of(instruction), held[instruction.target_mesh]))
        elif isinstance(instruction, (ShiftStart, ShiftDone)):
            holds.update(dict.fromkeys(outs_of(instruction), held[instruction.mesh]))
        else:
            holds.update(dict.fromkeys(instruction.outs, held[program.mesh]))
    return [position for position, slot in enumerate(program.outputs, 1 + program.inputs) if holds[slot]]


def operand_position(program: Program, operand: Operand) -> int:
    """Where in the command of a run the operand stands."""
    return 1 + program.inputs + len(program.outputs) + operand.index


def operand_value(program: Program, operand: Operand, command: list) -> Any:
    """What the operand is in the run that ``command`` asks for."""
    if operand.index >= program.operands:
        return program.constant(operand)
    return command[operand_position(program, operand)]


def _last_uses(program: Program) -> dict[int, list[int]]:
    """For an instruction's index, the temporaries that nothing after it needs."""
    last: dict[int, int] = {}
    for index, instruction in enumerate(program.body):
        used = [*slots_of(instruction), *outs_of(instruction)]
        last.update((slot, index) for slot in used if slot >= program.inputs)
    dead: dict[int, list[int]] = {}
    for slot, index in last.items():
        if slot not in program.outputs:
            dead.setdefault(index, []).append(slot)
    return dead


def _tensor_paths(op: torch._ops.OpOverload, count: int) -> list[str] | None:
    """How to reach each tensor of the op's result: by suffixes of the result, or None where it must be flattened."""
    returns = op._schema.returns
    kinds = [str(r.type) for r in returns]
    if kinds == ["Tensor"]:
        return [""]
    if kinds in (["List[Tensor]"], ["List[Optional[Tensor]]"]):
        return [f"[{n}]" for n in range(count)]
    if all(kind in ("Tensor", "Optional[Tensor]") for kind in kinds):
        return [f"[{n}]" for n in range(count)]
    return None
