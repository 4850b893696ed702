"""One device's part of every command: its values, its meshes, its programs.

Programs take the shortest way: a dictionary look-up and a call. What fails is found out in the handler: a `Poison` is no
tensor, so torch raises when it meets one, and the fast path looks at nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import torch

from ..engine import protocol
from ..mesh import DeviceMesh
from ..program.ir import Communication, Op, Program, ShiftDone, ShiftStart, slots_of
from ..raw import dtype_called
from ..sharding.rearrange import Shift
from ..sharding.transfer import Half, Transfer
from .bindings import Site, planner_of, shift_of
from .damage import live_bytes, poison_aliases, storage_id, written_inputs
from .lower import (
    FILENAME,
    Code,
    Function,
    Held,
    bind,
    generate,
    operand_value,
    present_outputs,
    takes_part,
)
from .poison import Poison
from .products import Empty
from .restride import is_certainly_in_order, restride
from .tracing import Tracer
from .values_in_out import Blobs, Value, ValuesInOut, torch_device

Move = Transfer | Half | Shift
Steps = Generator[tuple[Move, "Value | None"], "Value | None", None]
"""What a command that communicates is: it yields ``(transfer, local source tensor)`` and is sent the transfer's result.

A `Shift` takes two: where it starts the device gives its tensor and gets nothing, where it ends the other way round. The `Half` of a
transfer that starts gets nothing either; the tensor is there again where it ends.

The tensor is None where the device holds no part of the source, a `Poison` where its part failed; the result is None where
the device gets no part (``transfer.shape is None``), a `Poison` where any source that it needs is one. It yields only
transfers whose group holds other devices; the order is the same on every member of a group. An error thrown in is the
command's failure; the transfer that was yielded counts as made.
"""

#: Seconds between looks at the store for STATS' peak. A look costs about 0.3 us a value.
PEAK_INTERVAL = 0.02


class CodeCache:
    """Generated programs. One may be shared by the executors of one process: it holds nothing of a single device."""

    def __init__(self) -> None:
        self._codes: dict[tuple, Code] = {}
        self._functions: dict[int, Function] = {}

    def code(self, program_id: int, program: Program, held: Held, restrides: frozenset | None) -> Code:
        key = (program_id, tuple(held.items()), restrides)
        found = self._codes.get(key)
        if found is None:
            found = self._codes[key] = generate(program, held, restrides)
        return found

    def function(self, code: Code, site: Site) -> Function:
        """``code`` bound to ``site``; code that is the same everywhere is bound once."""
        if not code.everywhere:
            return bind(code, site)
        found = self._functions.get(id(code))
        if found is None:
            found = self._functions[id(code)] = bind(code, site)
        return found


@dataclasses.dataclass(slots=True)
class _Defined:
    """A program that concerns this device; ``code`` is what ran last."""

    program: Program
    site: Site
    held: Held
    code: Code | None = None


class Executor:
    """Runs commands of `dtorch.engine.protocol` for one device, always in the same grad or inference mode: with autograd off.

    Args:
        device: the device's id.
        emit: takes every event (REPLY, FAILED, POISONED).
        blobs: resolves the blobs of PUT and the landings of GET.
        codes: generated programs to share with other executors in this process.
        meshes: known meshes, by number, to share likewise.
        empty: makes memory for what is to be moved (`dtorch.worker.products`); None if that is like any other.
    """

    def __init__(
        self,
        device: int,
        emit: Callable[[list], None],
        blobs: Blobs,
        codes: CodeCache | None = None,
        meshes: dict[int, DeviceMesh] | None = None,
        empty: Empty | None = None,
    ) -> None:
        self.device = device
        self.values: dict[int, Value] = {}
        self.meshes: dict[int, DeviceMesh] = {} if meshes is None else meshes
        self._emit = emit
        self._empty = empty
        self._in_out = ValuesInOut(device, self.values, self.meshes, emit, blobs)
        self._codes = codes or CodeCache()
        self._functions: dict[int, Function] = {}
        self._generators: dict[int, Function] = {}
        self._defined: dict[int, _Defined] = {}
        self._peak = 0
        self._next_look = 0.0
        self._tracer: Tracer | None = None
        self._commands: dict[int, Callable[[list], Any]] = {
            protocol.FREE: self._free,
            protocol.DEFINE: lambda c: self.define(c[1], msgspec.msgpack.decode(c[2], type=Program)),
            protocol.MESH: lambda c: self.add_mesh(c[1], mesh_of(c)),
            protocol.PUT: self._in_out.put,
            protocol.GET: self._in_out.get,
            protocol.DESCRIBE: self._in_out.describe,
            protocol.SYNC: lambda c: self._in_out.reply(c[1], None),
            protocol.STATS: self._stats,
            protocol.IMPORT: lambda c: importlib.import_module(c[1]),
            protocol.THREADS: lambda c: torch.set_num_threads(c[1]),
            protocol.SHARDS: self._in_out.shards,
            protocol.DEFAULT_DTYPE: lambda c: torch.set_default_dtype(dtype_called(c[1])),
            protocol.TRACE: self._trace,
        }

    def run(self, command: list, sequence: int) -> Steps | None:
        """Run ``command``, the ``sequence``-th. None: it is done; else it communicates: drive what is returned to its end.

        Never raises for what a command does wrong: that poisons its outputs and emits FAILED.
        """
        kind = command[0]
        function = self._functions.get(kind)
        if function is not None:
            try:
                function(self.values, command)
            except Exception as error:
                self._fail(command, sequence, error)
            return None
        if kind in self._generators:
            return self._steps(command, sequence)
        handler = self._commands.get(kind)
        if handler is not None:
            try:
                handler(command)
            except Exception as error:
                self._fail_command(command, sequence, error)
        return None

    # Programs

    def add_mesh(self, mesh_id: int, mesh: DeviceMesh) -> None:
        """What MESH does, with the mesh made already."""
        self.meshes[mesh_id] = mesh

    def define(self, program_id: int, program: Program) -> None:
        """What DEFINE does, with the program decoded already. A program is lowered when it first runs."""
        held = {mesh: self.meshes[mesh].coordinate(self.device) is not None for mesh in sorted(program.meshes())}
        if program_id in self._defined or not any(held.values()):
            return
        device_type = self.meshes[program.mesh].device_type
        site = Site(self.device, torch_device(device_type, self.device), self.meshes, self._empty)
        self._defined[program_id] = _Defined(program, site, held)
        if any(isinstance(i, Communication) and takes_part(i, held) for i in program.body):
            self._generators[program_id] = functools.partial(self._first_steps, program_id)
        else:
            self._functions[program_id] = functools.partial(self._first_run, program_id)

    def _first_run(self, program_id: int, values: dict, command: list) -> None:
        function, restrides = self._probing(program_id)
        function(values, command)
        self._functions[program_id] = self._settled(program_id, restrides)

    def _first_steps(self, program_id: int, values: dict, command: list) -> Steps:
        function, restrides = self._probing(program_id)
        yield from function(values, command)
        self._generators[program_id] = self._settled(program_id, restrides)

    def _probing(self, program_id: int) -> tuple[Function, set[tuple[int, int]]]:
        """The function of the first run, and the results that it will have found not to be surely in order."""
        defined = self._defined[program_id]
        restrides: set[tuple[int, int]] = set()

        def probe(index: int, out: int, result: torch.Tensor, order: list[int], inputs: list) -> torch.Tensor:
            views = {storage_id(tensor) for tensor in inputs}
            if storage_id(result) in views or is_certainly_in_order(result, order):
                return result
            restrides.add((index, out))
            return restride(result, order)

        ordered = any(isinstance(i, Op) and any(order is not None for order in i.orders) for i in defined.program.body)
        defined.code = self._code(program_id, None if ordered else frozenset())
        return bind(defined.code, defined.site, probe), restrides

    def _settled(self, program_id: int, restrides: set[tuple[int, int]]) -> Function:
        """The function of every later run."""
        defined = self._defined[program_id]
        defined.code = self._code(program_id, frozenset(restrides))
        return self._codes.function(defined.code, defined.site)

    def _code(self, program_id: int, restrides: frozenset | None) -> Code:
        defined = self._defined[program_id]
        return self._codes.code(program_id, defined.program, defined.held, restrides)

    def _steps(self, command: list, sequence: int) -> Steps:
        try:
            yield from self._generators[command[0]](self.values, command)
            return
        except Exception as error:
            poison, start, after = self._fail(command, sequence, error)
        # The others wait for this device at every transfer that is left.
        for transfer in self._remaining(command, start, after):
            yield transfer, poison

    def _remaining(self, command: list, start: int, after: Move | None) -> list[Move]:
        """The transfers with others from instruction ``start`` on; in that one, only those behind ``after``."""
        defined = self._defined[command[0]]
        found: list[Move] = []
        for index, instruction in enumerate(defined.program.body[start:], start):
            if not isinstance(instruction, Communication) or not takes_part(instruction, defined.held):
                continue
            transfers: tuple[Move, ...]
            if isinstance(instruction, (ShiftStart, ShiftDone)):
                transfers = (shift_of(instruction).make(defined.site),)
            else:
                try:
                    plan = planner_of(instruction).make(defined.site)
                    transfers = plan(tuple(operand_value(defined.program, instruction.shape, command)))
                except ValueError:
                    continue  # nobody could plan it
            if index == start and after in transfers:
                transfers = transfers[transfers.index(after) + 1 :]
            found += [transfer for transfer in transfers if len(transfer.group) > 1]
        return found

    def _fail(self, command: list, sequence: int, error: Exception) -> tuple[Poison, int, Move | None]:
        """Poison what the command should have made or changed; report it unless it only met a poison.

        Returns:
            The poison, the index of the failing instruction, and the last transfer begun in it.
        """
        defined = self._defined[command[0]]
        program = defined.program
        index, names = _where(error, defined.code)
        inputs = [
            self.values.get(command[1 + slot]) if slot < program.inputs else names.get(f"s{slot}")
            for slot in (slots_of(program.body[index]) if program.body else ())
        ]
        poison = next((value for value in [*inputs, names.get("x")] if type(value) is Poison), None)
        if poison is None:
            poison = Poison((self.device, sequence))
            coordinate = self.meshes[program.mesh].coordinate(self.device)
            shapes = [list(value.shape) for value in inputs if isinstance(value, torch.Tensor)]
            self._report(sequence, error, None if coordinate is None else list(coordinate), shapes)
        for position in present_outputs(program, defined.held):
            self.values[command[position]] = poison
        for slot in written_inputs(program, index):
            written = self.values.get(command[1 + slot])
            if isinstance(written, torch.Tensor):
                poison_aliases(self.values, written, poison)
        return poison, index, names.get("t")

    def _report(self, sequence: int, error: Exception, coordinate: list[int] | None, shapes: list[list[int]]) -> None:
        message = f"value {error} is not in the store" if isinstance(error, KeyError) else str(error)
        self._emit([protocol.FAILED, self.device, sequence, type(error).__name__, message, coordinate, shapes])

    # Other commands

    def _fail_command(self, command: list, sequence: int, error: Exception) -> None:
        """A command that runs no program went wrong. Whoever waits for its reply gets a poison."""
        self._report(sequence, error, None, [])
        poison = Poison((self.device, sequence))
        if command[0] == protocol.PUT:
            self.values[command[1]] = poison
        elif command[0] in _REPLYING:
            self._in_out.reply_poison(command[1], poison)

    def _free(self, command: list) -> None:
        if time.monotonic() > self._next_look:
            self._look()
        pop = self.values.pop
        for value in command[1:]:
            pop(value, None)

    def _look(self) -> int:
        live = live_bytes(self.values)
        self._peak = max(self._peak, live)
        self._next_look = time.monotonic() + PEAK_INTERVAL
        return live

    def _stats(self, command: list) -> None:
        """``live``: bytes of the distinct storages that values keep. ``peak``: the most that was live when looked at.

        It is looked at here and before frees, at most every `PEAK_INTERVAL`: what lived only between two looks, or only
        inside a program, is missed.
        """
        live = self._look()
        self._in_out.reply(command[1], {"live": live, "peak": self._peak, "values": len(self.values)})
        if command[2]:
            self._peak = live

    def _trace(self, command: list) -> None:
        """While times are wanted another `run` stands before this one's; else they cost nothing."""
        _, token, what = command
        if self._tracer is None and what == "start":
            self._tracer = Tracer(self.run, self._program_code)
            self.run = self._tracer.run  # type: ignore[method-assign]
        self._in_out.reply(token, None if self._tracer is None else self._tracer.report())
        if self._tracer is not None and what == "stop":
            self._tracer = None
            del self.run

    def _program_code(self, program_id: int) -> Code | None:
        return self._defined[program_id].code


_REPLYING = (protocol.GET, protocol.DESCRIBE, protocol.SYNC, protocol.STATS, protocol.SHARDS, protocol.TRACE)


def mesh_of(command: list) -> DeviceMesh:
    """The mesh that a MESH command describes."""
    _, _, device_type, shape, device_ids, names = command
    return DeviceMesh(device_type, torch.tensor(device_ids).reshape(tuple(shape)), names)


def _where(error: Exception, code: Code | None) -> tuple[int, dict[str, Any]]:
    """The index of the instruction that raised, and the generated function's variables; 0 and none if it never ran."""
    traceback = error.__traceback__
    while traceback is not None:
        if code is not None and traceback.tb_frame.f_code.co_filename == FILENAME:
            return code.lines[traceback.tb_lineno], traceback.tb_frame.f_locals
        traceback = traceback.tb_next
    return 0, {}
