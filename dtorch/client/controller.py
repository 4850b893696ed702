"""The client's side of the cluster: one sequence of commands, lifetimes, futures and errors.

Everything that issues commands holds ``Controller.lock``, so there is one total order whatever thread an op comes from. Nothing
blocks while holding it: waits flush first and drop it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import msgspec
import torch

from .. import interrupts
from ..config import Config
from ..engine import protocol
from ..engine.interface import Engine
from ..errors import DTorchError, WorkerLost
from ..future import TensorFuture
from ..mesh import DeviceMesh
from ..placement import encode
from ..program.ir import Program
from ..raw import dtype_called, dtype_name, from_bytes, to_bytes
from ..sharding.spec import Spec, intern_mesh, mesh_id
from . import lines, watch
from .failures import Failures
from .idle import IdleTimer, seconds
from .replies import Collect, Gather, Waiting
from .values import FREED, Value, new_value, next_value_id

log = logging.getLogger("dtorch")

#: Commands in one batch at most: a message a command costs twice as much, and longer batches gain nothing more.
BATCH = 128
#: Commands the client may run ahead of the slowest worker.
AHEAD = 8192
#: How far ahead it is, it looks after every so many of them: a mask.
LOOK = 255
#: Bytes of results, per device, that may be asked for ahead of the workers.
AHEAD_BYTES = 1 << 30
#: Tensors up to this size travel inside messages, larger ones through shared memory.
INLINE_BYTES = 64 * 1024
#: Dead values that may wait for the next batch; before a large result is made none does.
FREES = 64
LARGE_BYTES = 256 * 1024
#: Seconds between two batches at least, while fewer than `BATCH` commands wait: at first, and once the workers have run dry again
#: and again. A send wakes a thread and every worker and costs what ten ops cost, so a loop of ops too small to keep the workers
#: busy is sent a hundred at a time; the first op after a pause or a read goes out at once, and those after it soon.
FIRST_INTERVAL = 0.0001
LAST_INTERVAL = 0.0016
#: Seconds after the last batch when queued commands are sent though nobody waits for them and nothing else is issued.
IDLE_FLUSH = seconds(0.002)
#: Seconds between two looks for values that die while nothing is issued.
IDLE_FREE = seconds(0.2)


#: Called with (controller, command, name, sequence) for each command that has a name, while somebody looks.
observers: list[Any] = []

#: Workers note when they run what: those that start now, too.
traced = False

#: This process. `os.getpid` is a system call, and every command checks that it is not issued by a forked child.
_pid = os.getpid()

_forked = False

_controllers: weakref.WeakSet[Controller] = weakref.WeakSet()


def _in_child() -> None:
    global _pid, _forked
    _pid = os.getpid()
    _forked = True
    for controller in _controllers:
        controller.usable = False


os.register_at_fork(after_in_child=_in_child)


class Controller:
    """One cluster: an engine, and what the client keeps about it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lock = threading.RLock()
        self.outbox: list[list] = []
        self.sequence = 0
        self.next_token = itertools.count(1).__next__
        self.programs: dict[bytes, int] = {}
        self.program_bodies: list[tuple[int, bytes]] = []
        #: Programs of redistributions, by all of one but the shape (`dtorch.client.redistribute`).
        self.moves: dict[tuple, int] = {}
        self.meshes: dict[int, DeviceMesh] = {}
        self.devices: set[tuple[str, int]] = set()
        self.waiting: dict[int, Waiting] = {}
        self.failures = Failures()
        self.lost: Exception | None = None
        #: Somebody has been told of the loss.
        self.loss_told = False
        self.closed = False
        #: Not lost, not closed, and of this process.
        self.usable = True
        self.pid = _pid
        #: Values before this one are of an earlier cluster, or of the process that this one was forked from.
        self.floor = next_value_id()
        self.sync = config.sync
        self.default_dtype = torch.get_default_dtype()
        self.bytes_ahead = 0
        self.bytes_carried = 0
        self.history = lines.History()
        self._sent = 0.0
        self._interval = FIRST_INTERVAL
        #: Nothing was issued for a while: the next command is sent at once.
        self._idle = True
        self._timer: IdleTimer | None = None
        interrupts.install()
        self.engine: Engine = _make_engine(config, self)
        _controllers.add(self)

    # -- issuing ------------------------------------------------------------------------------------------------------

    @interrupts.critical
    def issue(self, command: list, name: str | None = None, depth: int = 3) -> None:
        """Append one command; the caller holds the lock.

        Args:
            name: what an error says it is.
            depth: how many frames up from `History.note` the user's line may be at the nearest.
        """
        if not self.usable:
            raise self._unusable()
        outbox = self.outbox
        if len(FREED) > FREES:
            self.drain()
        sequence = self.sequence
        if name is not None:
            self.history.note(sequence, name, depth)
            if observers:
                for observe in observers:
                    observe(self, command, name, sequence)
        if watch.recorders:
            recorder = watch.recorder()
            if recorder is not None:
                recorder.take(self, command, name, sequence)
        self.sequence = sequence + 1
        outbox.append(command)
        if len(outbox) >= BATCH:
            self.flush()
        elif self._idle:
            self._idle = False
            self._interval = FIRST_INTERVAL
            self.flush()
        elif perf_counter() - self._sent > self._interval and not self.engine.behind():
            if self._interval < LAST_INTERVAL:
                self._interval *= 2
            self.flush()

    @interrupts.critical
    def _queue(self, command: list, name: str) -> None:
        """`issue` a command that goes out with the next, and that nobody records. The caller holds the lock."""
        if self.lost is not None or self.closed or self.pid != _pid:
            raise self._unusable()
        self.history.note(self.sequence, name, 3)
        for observe in observers:
            observe(self, command, name, self.sequence)
        self.sequence += 1
        self.outbox.append(command)

    @interrupts.critical
    def flush(self) -> None:
        """Send what is queued, and what has died. The caller holds the lock."""
        if FREED:
            self.drain()
        batch = self.outbox
        if batch:
            self.outbox = []
            self._sent = perf_counter()
            if log.isEnabledFor(logging.DEBUG):
                log.debug("send from %d: %s", self.sequence - len(batch), lines.shortened(batch))
            self.engine.send(batch)
            self._watch_idleness()

    def ran(self, nbytes: int) -> None:
        """Take note of an op that was issued, and of the bytes that its results take on a device. Called without the lock."""
        self.bytes_ahead += nbytes
        if not self.sequence & LOOK or self.bytes_ahead > AHEAD_BYTES:
            self.pressure()
        if self.sync:
            self.synchronize()

    def pressure(self) -> None:
        """Wait while the workers are too far behind. Called without the lock, after an op."""
        if self.sequence & LOOK and self.bytes_ahead < AHEAD_BYTES:
            return
        engine = self.engine
        if self.bytes_ahead >= AHEAD_BYTES:
            with self.lock:
                self.flush()
            engine.wait_behind(BATCH)
            self.bytes_ahead = 0
        elif engine.behind() > AHEAD:
            engine.wait_behind(AHEAD // 2)

    def carried(self, nbytes: int) -> None:
        """Note bytes on their way in or out, and wait while there are too many. Called without the lock, after they were asked for."""
        self.bytes_carried += nbytes
        if self.bytes_carried >= AHEAD_BYTES:
            with self.lock:
                self.flush()
            self.engine.wait_behind(0)
            self.bytes_carried = 0
        self.pressure()

    @interrupts.critical
    def drain(self) -> None:
        """Queue the frees of values that have died. The caller holds the lock."""
        take = FREED.popleft
        ids = [take() for _ in range(len(FREED))]
        for recorder in list(watch.recorders.values()):
            recorder.freed.update(ids)
        self.outbox.append([protocol.FREE, *ids])
        self.sequence += 1

    def _watch_idleness(self) -> None:
        """Something was sent just now: note if nothing follows."""
        if self._timer is None:
            if sys.platform != "linux":  # where there is only simulation
                self._idle = True
                return
            self._timer = IdleTimer(self._when_idle)
        self._timer.restart(IDLE_FLUSH)

    def _when_idle(self) -> bool:
        """Send what is queued, though Python may do something else for a minute."""
        with self.lock:
            if not self.usable:
                return False
            self._idle = not self.outbox
            if self.outbox or FREED:
                try:
                    self.flush()
                except Exception as error:
                    # Nobody else would hear of it, and whoever waits would wait for ever.
                    self.on_lost(WorkerLost(f"commands could not be sent: {error!r}"))
            if self._timer is not None and self._idle:
                self._timer.restart(IDLE_FREE)
        return True

    def _unusable(self) -> Exception:
        if self.pid != _pid:
            return self.foreign()
        if self.lost is not None:
            self.loss_told = True
            return type(self.lost)(*self.lost.args)
        return DTorchError("this tensor belongs to a cluster that has been shut down; make it anew after dtorch.init()")

    def foreign(self) -> DTorchError:
        """What the use of a value below `floor` raises."""
        if _forked:
            return DTorchError(
                "a forked process cannot use the dtorch tensors of its parent; "
                "create tensors after the fork, or pass plain tensors (x.to_torch()) to it"
            )
        return DTorchError("this tensor belongs to a cluster that has been shut down; make it anew")

    # -- meshes and programs ------------------------------------------------------------------------------------------

    def mesh(self, mesh: DeviceMesh) -> int:
        """The id of ``mesh``; its devices are started, and the workers told about it, at its first use."""
        number = mesh_id(mesh)
        if number not in self.meshes:
            self._ensure(mesh)
            with self.lock:
                if number not in self.meshes:
                    self.issue(_mesh_command(number, mesh))
                    self.meshes[number] = mesh
        return number

    def _ensure(self, mesh: DeviceMesh) -> None:
        missing = [i for i in mesh.device_ids if (mesh.device_type, i) not in self.devices]
        if not missing:
            return
        with self.lock:
            self.flush()
            self.engine.ensure(mesh.device_type, mesh.device_ids)
            self.devices |= {(mesh.device_type, i) for i in mesh.device_ids}
            if traced:
                self.issue([protocol.TRACE, 0, "start"])
                self.flush()
            for number, known in self.meshes.items():  # newcomers missed them
                self.issue(_mesh_command(number, known))
            for program, body in self.program_bodies:
                self.issue([protocol.DEFINE, program, body])
            self.issue([protocol.DEFAULT_DTYPE, dtype_name(self.default_dtype)])

    def follow_default_dtype(self) -> None:
        """Tell the workers what ``torch.get_default_dtype`` says now. Called without the lock; plans made before are void."""
        with self.lock:
            self.default_dtype = torch.get_default_dtype()
            if self.devices:
                self.issue([protocol.DEFAULT_DTYPE, dtype_name(self.default_dtype)])

    @interrupts.critical
    def define(self, program: Program) -> int:
        """The id of ``program``, sent to the workers once."""
        body = msgspec.msgpack.encode(program)
        with self.lock:
            number = self.programs.get(body)
            if number is None:
                number = self.programs[body] = protocol.FIRST_PROGRAM + len(self.programs)
                self.program_bodies.append((number, body))
                log.debug("program %d: %s", number, program)
                self.issue([protocol.DEFINE, number, body])
        return number

    # -- values in and out --------------------------------------------------------------------------------------------

    def put(self, tensor: torch.Tensor, spec: Spec, *, alone: bool = True) -> Value:
        """Place a whole plain tensor. It is copied before this returns. Not ``alone``: it may go out with the next command."""
        if self.lost is not None:
            raise self._unusable()
        mesh = self.mesh(spec.mesh)
        source = tensor
        issue = self.issue if alone else self._queue
        value: Value | None = None

        def send(blob: Any, now: bool) -> None:
            nonlocal value
            with self.lock:
                value = new_value()
                placements = encode(spec.placements)
                issue([protocol.PUT, value.id, mesh, placements, list(spec.shape), dtype_name(spec.dtype), blob], "put")
                if now:
                    self.flush()

        if tensor.nbytes <= INLINE_BYTES:
            send(to_bytes(tensor), False)
        else:
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            self.engine.stage(plain, _alone(spec), send)
        assert value is not None
        recorder = watch.recorder()
        if recorder is not None:
            recorder.put(source, value, spec)
        self.carried(tensor.nbytes)
        return value

    def get(self, value: Value, spec: Spec) -> TensorFuture:
        """Ask for a whole tensor, which must have no Partial; a future of a plain contiguous CPU tensor."""
        if value.id < self.floor:
            raise self.foreign()
        landing = None
        if spec.nbytes > INLINE_BYTES:
            landing = self.engine.landing(spec.nbytes)
        mesh = spec.mesh
        sharded = [a for a, p in enumerate(spec.placements) if p.is_shard()]
        expected = math.prod(mesh.shape[a] for a in sharded)
        future = TensorFuture()
        gather = Gather(future, spec, expected, landing, self.engine)
        self._ask(
            gather,
            lambda token: [
                protocol.GET, token, value.id, mesh_id(mesh), encode(spec.placements), list(spec.shape), dtype_name(spec.dtype),
                landing,
            ],
            "read",
        )  # fmt: skip
        return future

    def shards(self, value: Value, spec: Spec) -> dict[int, torch.Tensor]:
        """What every device holds, by device id."""
        if value.id < self.floor:
            raise self.foreign()
        waiting = Collect(TensorFuture(), len(spec.mesh.device_ids))
        self._ask(waiting, lambda token: [protocol.SHARDS, token, value.id, mesh_id(spec.mesh)])
        replies = self.wait(waiting.future)
        return {i: from_bytes(replies[i][2], dtype_called(replies[i][1]), replies[i][0]) for i in spec.mesh.device_ids}

    def disregard(self, value: Value, mesh: DeviceMesh) -> None:
        """Nobody need be told why a device has no ``value``, if it has none: who asked for it has given up. Does not wait."""
        if self.lost is not None or self.closed:
            return
        for device in mesh.device_ids:  # which may have failed for a reason of its own
            alone = self.mesh(intern_mesh(DeviceMesh(mesh.device_type, [device])))
            self._ask(
                Collect(TensorFuture(), 1),
                lambda token, alone=alone: [protocol.SHARDS, token, value.id, alone],  # type: ignore[misc]
            )

    def describe(self, values: Sequence[int], mesh: DeviceMesh) -> list[tuple[list[int], list[int], torch.dtype]]:
        """Shape, stride and dtype of values as the mesh's first device holds them; waits."""
        waiting = Collect(TensorFuture(), 1)
        self._ask(waiting, lambda token: [protocol.DESCRIBE, token, mesh_id(mesh), *values])
        (reply,) = self.wait(waiting.future).values()
        return [(shape, stride, dtype_called(dtype)) for shape, stride, dtype in reply]

    def ask_all(self, command: int, *arguments: Any) -> dict[int, Any]:
        """Ask every worker; the replies by device id."""
        return self.wait(self.ask_all_async(TensorFuture(), command, *arguments)) if self.devices else {}

    def ask_all_async(self, future: TensorFuture, command: int, *arguments: Any) -> TensorFuture:
        """Ask every worker, of which there are some; ``future``, which gets the replies by device id."""
        self._ask(Collect(future, len({i for _, i in self.devices})), lambda token: [command, token, *arguments])
        return future

    def _ask(self, waiting: Waiting, command: Any, name: str | None = None) -> None:
        with self.lock:
            token = self.next_token()
            self.waiting[token] = waiting
            try:
                self.issue(command(token), name)
                self.flush()
                self._interval = FIRST_INTERVAL
            except BaseException:
                self.waiting.pop(token, None)
                raise

    def wait(self, future: TensorFuture) -> Any:
        """The value of a future of ours; everything queued is on its way already."""
        return future.get()

    def synchronize(self) -> None:
        """Wait until everything issued has run; raise the first failure nobody has seen."""
        if self.devices:
            self.ask_all(protocol.SYNC)
        self._raise_unseen()

    def _raise_unseen(self, _: Any = None) -> None:
        failure = self.failures.unseen()
        if failure is not None:
            raise self.failures.report(failure)

    def synchronize_async(self) -> TensorFuture:
        """A future of None that is done, or raises, when `synchronize` would return or raise."""

        future = TensorFuture(self._raise_unseen)
        if self.devices:
            return self.ask_all_async(future, protocol.SYNC)
        future._set()
        return future

    def mark(self) -> TensorFuture:
        """A future that is done when everything issued so far has run, well or not."""
        return self.ask_all_async(TensorFuture(), protocol.SYNC)

    # -- events -------------------------------------------------------------------------------------------------------

    def on_event(self, event: list) -> None:
        """Take one worker event; runs in the engine's receiving thread, or inside `flush` when simulating."""
        kind = event[0]
        if log.isEnabledFor(logging.DEBUG):
            log.debug("event: %s", lines.shortened(event))
        if kind == protocol.REPLY:
            _, device, token, payload = event
            waiting = self.waiting.get(token)
            if waiting is not None and waiting.arrived(device, payload):
                self.waiting.pop(token, None)
        elif kind == protocol.FAILED:
            self.failures.failed(event, self.history.describe(event[2]), self.floor, self.foreign())
        elif kind == protocol.POISONED:
            _, device, token, origin = event
            waiting = self.waiting.pop(token, None)
            if waiting is not None:
                self.failures.poisoned(waiting, tuple(origin))

    def on_lost(self, error: Exception) -> None:
        """The cluster is gone: whatever waits, and every later call, gets ``error``."""
        if self.closed:
            return
        self.lost = error
        self.usable = False
        pending = [*self.waiting.values(), *self.failures.orphans()]
        self.waiting.clear()
        for waiting in pending:
            self.loss_told = True
            waiting.fail(type(error)(*error.args))

    def close(self) -> None:
        """End the workers. Values still waited for fail."""
        if self.closed:
            return
        self.closed = True
        self.usable = False
        interrupts.uninstall()
        if self.pid == _pid:
            if self._timer is not None:
                self._timer.stop()
            self.engine.close()
        error = WorkerLost("the cluster was shut down while a value was being waited for")
        for waiting in list(self.waiting.values()):
            waiting.fail(error)
        self.waiting.clear()


def _alone(spec: Spec) -> tuple[int, ...]:
    """The cpu devices that hold a tensor, if no two of them hold the same."""
    mesh = spec.mesh
    shared = any(p.is_replicate() and size > 1 for p, size in zip(spec.placements, mesh.shape, strict=True))
    return () if shared or mesh.device_type != "cpu" else tuple(mesh.device_ids)


def _make_engine(config: Config, controller: Controller) -> Engine:
    if config.engine == "simulate":
        from ..engine.simulate import SimulatedEngine

        return SimulatedEngine(
            controller.on_event,
            controller.on_lost,
            threads_per_worker=config.threads_per_worker,
            worker_imports=config.worker_imports,
        )
    if sys.platform != "linux":
        raise DTorchError(
            f"worker processes need Linux, this is {sys.platform}; dtorch.init(engine='simulate') runs everything in this process"
        )
    from ..engine.local import LocalEngine

    return LocalEngine(
        controller.on_event,
        controller.on_lost,
        devices=config.devices,
        threads_per_worker=config.threads_per_worker,
        worker_imports=config.worker_imports,
        arena_bytes=config.arena_bytes,
    )


def _mesh_command(number: int, mesh: DeviceMesh) -> list:
    names = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
    return [protocol.MESH, number, mesh.device_type, list(mesh.shape), list(mesh.device_ids), names]
