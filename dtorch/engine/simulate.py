"""The engine without processes: any number of virtual devices in this one, for tests, teaching and large meshes on a laptop."""

from __future__ import annotations

import importlib
import os
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch

from ..errors import DeviceUnavailable
from ..mesh import DeviceMesh
from ..program.ir import Program
from ..raw import copy, flat_bytes
from ..sharding.layout import Box
from ..sharding.rearrange import Shift
from ..sharding.transfer import Half, Transfer
from ..worker.assemble import assemble, cut
from ..worker.executor import CodeCache, Executor, Steps, mesh_of
from ..worker.poison import Poison
from ..worker.values_in_out import Value
from . import protocol
from .interface import EventHandler, LostHandler


class SimulatedEngine:
    """See `dtorch.engine.interface.Engine`. A batch has run, and its events have been handled, when `send` returns.

    Commands run in a thread of the engine's own, one after the other, on all the devices they concern, in lockstep at
    every transfer. There, no mode that the caller is in (autocast, inference mode, a dispatch mode, vmap) reaches them, as
    none would reach another process.

    Args:
        threads_per_worker: torch threads for the whole simulation; None leaves torch's setting alone.
        worker_imports: modules that register custom ops.
    """

    def __init__(
        self,
        on_event: EventHandler,
        on_lost: LostHandler,
        *,
        threads_per_worker: int | None = None,
        worker_imports: Sequence[str] = (),
    ) -> None:
        self._on_event = on_event
        self._on_lost = on_lost
        self._world = _World()
        self._batches: queue.SimpleQueue[list[list] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._closed = False
        for name in worker_imports:
            importlib.import_module(name)
        if threads_per_worker is not None:
            torch.set_num_threads(threads_per_worker)
        self._thread = threading.Thread(target=self._work, name="dtorch-simulation", daemon=True)
        self._thread.start()

    def ensure(self, device_type: str, device_ids: Sequence[int]) -> None:
        if device_type != "cpu":
            raise DeviceUnavailable(f"the simulation has only cpu devices, not {device_type}:{device_ids[0]}")
        self._world.add_devices(device_ids)

    def send(self, commands: list[list]) -> None:
        self._run(commands)

    def behind(self) -> int:
        return 0

    def wait_behind(self, limit: int) -> None:
        pass

    def workers(self) -> dict[int, tuple[int, int, str]]:
        return {device: (os.getpid(), 0, "running") for device in self._world.devices()}

    def stage(self, tensor: torch.Tensor, devices: Sequence[int], send: Callable[[Any, bool], None]) -> None:
        send(tensor, False)

    def landing(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def landed(self, landing: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return landing.view(dtype).view(tuple(shape))

    def release(self, landing: Any) -> None:
        pass

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._batches.put(None)
            self._thread.join()
            self._world = _World()

    def _run(self, commands: list[list]) -> None:
        self._batches.put(commands)
        error = self._done.get()
        events, self._world.events = self._world.events, []
        for event in events:
            self._on_event(event)
        if error is not None:
            raise error

    @torch.no_grad()
    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                for command in batch:
                    self._world.run(command)
            except BaseException as error:  # a fault of ours: the caller of `send` gets it
                self._done.put(error)
            else:
                self._done.put(None)


_CPU = torch.device("cpu")


class _Blobs:
    """Blobs and landings are the client's own tensors; executors copy out of and into them."""

    def fill(self, target: torch.Tensor, blob: Any, dtype: torch.dtype, shape: Sequence[int], box: Box) -> None:
        flat = (
            flat_bytes(blob) if isinstance(blob, torch.Tensor) else torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        )
        copy(target, cut(flat.view(dtype).view(tuple(shape)), box))

    def landing(self, landing: Any) -> torch.Tensor:
        return landing


class _World:
    """All devices and what they share."""

    def __init__(self) -> None:
        self.events: list[list] = []
        self._executors: dict[int, Executor] = {}
        self._meshes: dict[int, DeviceMesh] = {}
        self._concerned: dict[int, list[Executor]] = {}  # by program
        self._programs: dict[int, Program] = {}
        self._codes = CodeCache()
        self._sequence = 0

    def add_devices(self, device_ids: Iterable[int]) -> None:
        for device in device_ids:
            if device not in self._executors:
                self._executors[device] = Executor(device, self._emit, _Blobs(), self._codes, self._meshes)

    def devices(self) -> list[int]:
        return list(self._executors)

    def _emit(self, event: list) -> None:
        self.events.append(event)

    def run(self, command: list) -> None:
        sequence = self._sequence
        self._sequence += 1
        kind = command[0]
        if kind >= protocol.FIRST_PROGRAM:
            waiting = {}
            for executor in self._concerned.get(kind, ()):
                steps = executor.run(command, sequence)
                if steps is not None:
                    waiting[executor.device] = steps
            if waiting:
                _drive(waiting)
        elif kind == protocol.MESH:
            self._meshes[command[1]] = mesh_of(command)
        elif kind == protocol.DEFINE:
            self._define(command[1], command[2])
        else:
            for executor in self._addressed(command):
                executor.run(command, sequence)

    def _define(self, program_id: int, encoded: bytes) -> None:
        program = msgspec.msgpack.decode(encoded, type=Program)
        devices = sorted({device for mesh in program.meshes() for device in self._meshes[mesh].device_ids})
        self._concerned[program_id] = [self._executors[device] for device in devices]
        for executor in self._concerned[program_id]:
            executor.define(program_id, program)

    def _addressed(self, command: list) -> Iterable[Executor]:
        """The devices that a command can concern."""
        at = _MESH_AT.get(command[0])
        if at is None:
            return list(self._executors.values())
        return [self._executors[device] for device in self._meshes[command[at]].device_ids]


#: Where a command that concerns one mesh names it.
_MESH_AT = {protocol.PUT: 2, protocol.GET: 3, protocol.DESCRIBE: 2, protocol.SHARDS: 3}


def _drive(waiting: dict[int, Steps]) -> None:
    """Drive what devices run of one command to the end of each, a group at a time.

    A group's transfer is made when all its members have come to it. Groups meet their transfers in program order, so some
    group is always complete, or some device's shift is on its way.
    """
    pending: dict[int, tuple[Transfer | Half | Shift, Value | None]] = {}
    on_the_way: dict[tuple[int, int], deque[Value | None]] = defaultdict(deque)
    shown: dict[int, deque[Value | None]] = defaultdict(deque)
    results: dict[int, Value | None] = dict.fromkeys(waiting)
    while waiting:
        for device, result in results.items():
            try:
                pending[device] = waiting[device].send(result)
            except StopIteration:
                del waiting[device]
                pending.pop(device, None)
        results = _shifted(pending, on_the_way) | _shown(pending, shown)
        led = [move.group for device, (move, _) in pending.items() if _leads(move, device)]
        ready = [group for group in led if all(_is_at(pending.get(device), group) for device in group)]
        if pending and not ready and not results:
            raise RuntimeError(f"devices {sorted(pending)} wait for transfers that never come together")
        for group in ready:
            results.update(_exchange({device: pending[device] for device in group}))  # type: ignore[misc]


def _leads(move: Transfer | Half | Shift, device: int) -> bool:
    return isinstance(move, Transfer) and move.group[0] == device


def _is_at(request: tuple[Transfer | Half | Shift, Value | None] | None, group: tuple[int, ...]) -> bool:
    """Whether a device has come to a transfer of ``group``; a shift may concern the same devices."""
    return request is not None and isinstance(request[0], Transfer) and request[0].group == group


def _shifted(
    pending: dict[int, tuple[Transfer | Half | Shift, Value | None]],
    on_the_way: dict[tuple[int, int], deque[Value | None]],
) -> dict[int, Value | None]:
    """The results of the shifts that can go on: all that start, and those that end whose value is on the way."""
    results: dict[int, Value | None] = {}
    for device, (move, value) in pending.items():
        if not isinstance(move, Shift):
            continue
        if move.starts:
            on_the_way[device, move.receiver].append(value.clone() if isinstance(value, torch.Tensor) else value)
            results[device] = None
        elif on_the_way[move.sender, device]:
            results[device] = on_the_way[move.sender, device].popleft()
    return results


def _shown(
    pending: dict[int, tuple[Transfer | Half | Shift, Value | None]], shown: dict[int, deque[Value | None]]
) -> dict[int, Value | None]:
    """The results of the halves that start. One that ends is from here on the transfer of what was shown then."""
    results: dict[int, Value | None] = {}
    for device, (move, value) in pending.items():
        if not isinstance(move, Half):
            continue
        if move.starts:
            shown[device].append(value.clone() if isinstance(value, torch.Tensor) else value)
            results[device] = None
        else:
            pending[device] = move.transfer, shown[device].popleft()
    return results


def _exchange(requests: dict[int, tuple[Transfer, Value | None]]) -> dict[int, Value | None]:
    """The result of each of a group's members. What replicas share is put together once and copied."""
    made: dict[tuple, torch.Tensor] = {}
    results: dict[int, Value | None] = {}
    for device, (transfer, _) in requests.items():
        if transfer.shape is None:
            results[device] = None
            continue
        needed = dict.fromkeys(piece.device for term in transfer.terms for piece in term)
        poison = next((requests[d][1] for d in needed if isinstance(requests[d][1], Poison)), None)
        if poison is not None:
            results[device] = poison
            continue
        key = (id(transfer.terms), transfer.shape, transfer.zeros)
        if key in made:
            results[device] = made[key].clone()
            continue
        results[device] = made[key] = assemble(transfer, lambda d: requests[d][1], _CPU)  # type: ignore[arg-type,return-value]
    return results
