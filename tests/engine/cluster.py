"""A local engine fed by hand, for tests: what the controller does, without a controller."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from dtorch.engine import protocol
from dtorch.engine.local import LocalEngine
from dtorch.mesh import DeviceMesh
from dtorch.placement import Placement, decode, encode
from dtorch.program.ir import Op, Operand, Program, Reshard, Slot
from dtorch.raw import dtype_name
from dtorch.sharding.layout import box_shape, local_box

SECONDS = 20.0


class Cluster:
    """An engine, the meshes and programs it knows, and its events."""

    def __init__(self, **options: Any) -> None:
        self.events: queue.Queue[list] = queue.Queue()
        self.lost: queue.Queue[Exception] = queue.Queue()
        self.engine = LocalEngine(self.events.put, self.lost.put, **options)
        self.meshes: dict[DeviceMesh, int] = {}
        self.sequence = 0
        self._ids = iter(range(1, 1 << 30))
        self._programs = iter(range(protocol.FIRST_PROGRAM, 1 << 30))

    def send(self, *commands: list) -> int:
        """The sequence number of the first."""
        first = self.sequence
        self.sequence += len(commands)
        self.engine.send(list(commands))
        return first

    def mesh(self, *ids: Any) -> DeviceMesh:
        mesh = DeviceMesh("cpu", list(ids))
        self.engine.ensure("cpu", mesh.device_ids)
        self.meshes[mesh] = next(self._ids)
        for known, number in self.meshes.items():  # newcomers missed the others
            self.send([protocol.MESH, number, "cpu", list(known.shape), list(known.device_ids), None])
        return mesh

    def put(self, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], stage: bool = False) -> int:
        value = next(self._ids)
        dtype = str(tensor.dtype).removeprefix("torch.")
        command = [protocol.PUT, value, self.meshes[mesh], encode(placements), list(tensor.shape), dtype]
        if stage:
            self.engine.stage(tensor, mesh.device_ids, lambda blob, now: self.send([*command, blob]))
        else:
            self.send([*command, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()])
        return value

    def op(self, name: str, mesh: DeviceMesh, *values: int) -> int:
        """Run a program of one op; its result."""
        body = [Op(name, [Slot(i) for i in range(len(values))], {}, [len(values)])]
        return self.run(Program(name, self.meshes[mesh], len(values), 0, body, [len(values)]), [*values], [])

    def reshard(
        self,
        value: int,
        shape: Sequence[int],
        source: tuple[DeviceMesh, Sequence[Placement]],
        target: tuple[DeviceMesh, Sequence[Placement]],
        dtype: str = "float32",
    ) -> int:
        instruction = Reshard(
            0,
            1,
            self.meshes[source[0]],
            encode(source[1]),
            self.meshes[target[0]],
            encode(target[1]),
            Operand(0),
            dtype,
        )
        return self.run(Program("reshard", self.meshes[target[0]], 1, 1, [instruction], [1]), [value], [list(shape)])

    def run(self, program: Program, inputs: list[int], operands: list[Any]) -> int:
        number, result = next(self._programs), next(self._ids)
        self.send([protocol.DEFINE, number, msgspec.msgpack.encode(program)], [number, *inputs, result, *operands])
        return result

    def token(self) -> int:
        return next(self._ids)

    def replies(self, token: int, count: int) -> dict[int, Any]:
        """The payloads of ``count`` replies to ``token``, by device. A poisoned one is its origin, in a tuple."""
        found = {}
        while len(found) < count:
            event = self.events.get(timeout=SECONDS)
            if event[0] in (protocol.REPLY, protocol.POISONED) and event[2] == token:
                found[event[1]] = event[3] if event[0] == protocol.REPLY else tuple(event[3])
        return found

    def get(
        self,
        value: int,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        token = self.token()
        codes = encode(placements)
        self.send([protocol.GET, token, value, self.meshes[mesh], codes, list(shape), dtype_name(dtype), None])
        boxes = {}
        for device in mesh.device_ids:
            coordinate = mesh.coordinate(device)
            if all(not (p.is_replicate() and i) for p, i in zip(decode(codes), coordinate, strict=True)):
                boxes[device] = local_box(decode(codes), mesh.shape, coordinate, shape)
        whole = torch.empty(tuple(shape), dtype=dtype)
        for device, payload in self.replies(token, len(boxes)).items():
            if isinstance(payload, tuple):
                raise RuntimeError(f"poisoned by {payload}")
            if payload:
                part = torch.frombuffer(bytearray(payload), dtype=dtype).view(box_shape(boxes[device]))
                whole[tuple(slice(*edge) for edge in boxes[device])] = part
        return whole

    def sync(self, count: int) -> None:
        token = self.token()
        self.send([protocol.SYNC, token])
        self.replies(token, count)


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Cluster]:
    """A `Cluster`, closed in the end."""
    cluster = Cluster(**options)
    try:
        yield cluster
    finally:
        cluster.engine.close()


def until(true: Callable[[], Any], seconds: float, step: float = 0.02) -> bool:
    """Whether ``true()`` becomes so within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(step)
    return True


def gone(pids: Iterable[int]) -> bool:
    """Whether none of these processes lives; one that its parent has yet to collect is dead."""
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] not in ("Z", "X"):
                return False
    return True


def children(pid: int) -> Iterator[int]:
    """The process ids of all descendants."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as listed:
            direct = [int(child) for child in listed.read().split()]
    except OSError:
        return
    for child in direct:
        yield child
        yield from children(child)
