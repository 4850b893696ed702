"""Tensors between files and the workers that hold them: each worker moves its own part, the client none of it."""

from __future__ import annotations

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import torch

from ..client import fresh, in_place, runtime
from ..mesh import DeviceMesh
from ..placement import PARTIAL, PlacementList, boxed, is_packed, shard
from ..sharding.spec import Spec, intern_mesh
from ..tensor import Tensor
from ..worker.functions_files import mapped, opened
from .checkpoints import Entry

#: Bytes between two looks at how far the workers are, and looks ahead: what the progress bar may be late.
STEP = 32 << 20
STEPS_AHEAD = 4

#: Whose bytes are those of plain and of uncommitted tensors.
CLIENT = "client"

Moved = dict["torch.device | str", int]
"""Bytes by who read or wrote them: a device, or ``"client"``."""


class Tally:
    """Counts the bytes that each device moves, shows them, and holds the client back to a few steps ahead of the workers.

    A context. When it is left by an error, Ctrl-C perhaps, what is still on its way may fail, for its file goes; nobody is told of that.
    """

    def __init__(self, what: str, total: int, progress: bool) -> None:
        from tqdm.auto import tqdm

        self._counts: dict[DeviceMesh, Tensor] = {}
        self._steps: collections.deque = collections.deque()
        self._since = 0
        self._here = 0
        self._bar = tqdm(
            total=total,
            desc=what,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=None if progress else True,  # None: only where somebody looks
        )

    def __enter__(self) -> Tally:  # noqa: PYI034 - typing.Self is not in Python 3.10
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.close()
        opened.cache_clear()
        if kind is not None:
            for count in self._counts.values():
                runtime.controller().disregard(count._value, count._spec.mesh)

    def count(self, mesh: DeviceMesh) -> Tensor:
        """What each device of ``mesh`` adds its bytes to. A device that fails poisons it, and so whatever it moves from then on."""
        found = self._counts.get(mesh)
        if found is None:
            spec = Spec.of(intern_mesh(mesh), PlacementList((PARTIAL,) * mesh.ndim), (1,), None, torch.int64)
            found = self._counts[mesh] = fresh.filled(spec, 0)
        return found

    def moved_here(self, nbytes: int) -> None:
        """The client has moved bytes itself."""
        self._here += nbytes

    def issued(self, nbytes: int) -> None:
        """Note bytes on their way; wait while they are too many."""
        self._since += nbytes
        if self._since >= STEP:
            self._step()
            while len(self._steps) > STEPS_AHEAD:
                self._settle()

    def finish(self) -> Moved:
        """Wait for all that was issued.

        Raises:
            RemoteError: a device could not move its part; it says of which tensor and which file.
        """
        self._step()
        while self._steps:
            self._settle()
        moved: Moved = {CLIENT: self._here} if self._here else {}
        for mesh, count in self._counts.items():
            in_place.run("dtorch.close_files", [count], (), ())
            for device, bytes_moved in runtime.controller().shards(count._value, count._spec).items():
                key = torch.device(mesh.device_type, device)
                moved[key] = moved.get(key, 0) + int(bytes_moved)
        return moved

    def _step(self) -> None:
        if self._counts:
            self._steps.append((runtime.controller().mark(), self._since))
        else:  # nothing is on its way
            self._bar.update(self._since)
        self._since = 0

    def _settle(self) -> None:
        future, nbytes = self._steps.popleft()
        future.get()
        self._bar.update(nbytes)


def is_placed(tensor: torch.Tensor) -> TypeGuard[Tensor]:
    """Whether a tensor's values are on workers."""
    return isinstance(tensor, Tensor) and tensor._spec is not None


def read(pairs: Sequence[tuple[torch.Tensor, Entry]], progress: bool) -> Moved:
    """Fill each tensor with the entry that belongs to it, converted to the tensor's dtype; they fit already.

    Returns:
        The bytes read.
    """
    total = sum(entry.nbytes for _, entry in pairs)
    with Tally("Loading", total, progress) as tally:
        for tensor, entry in sorted(pairs, key=lambda pair: pair[1].path):
            read_one(tensor, entry, tally)
        return tally.finish()


@torch.no_grad()
def read_one(tensor: torch.Tensor, entry: Entry, tally: Tally) -> None:
    """Have one tensor filled; `Tally.finish` waits for it."""
    if is_placed(tensor) and tensor._spec.has_packed:  # each device reads one part in a row, and they exchange
        spec = tensor._spec
        rows = spec.with_placements(PlacementList(shard(0) if is_packed(p) else p for p in spec.placements))
        part = fresh.filled(rows, 0)
        read_one(part, entry, tally)
        tensor.copy_(part)
        return
    if is_placed(tensor):
        where = [os.fsencode(entry.path), list(entry.stamp), entry.name]
        in_place.run("dtorch.read_part", [tensor, tally.count(tensor._spec.mesh)], where, (0, 1))
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
    else:
        tensor.copy_(entry.read())
        tally.moved_here(entry.nbytes)
    tally.issued(entry.nbytes)


def write(files: Mapping[Path, Mapping[str, torch.Tensor]], starts: Mapping[str, int], progress: bool) -> Moved:
    """Write each tensor to its file, which is as large already, from the byte that ``starts`` says.

    Returns:
        The bytes written.
    """
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    with Tally("Saving", total, progress) as tally, torch.no_grad():
        for path, tensors in files.items():
            for name, tensor in tensors.items():
                if not is_placed(tensor):
                    if tensor.numel():
                        plain = tensor.to_torch() if isinstance(tensor, Tensor) else tensor.detach()
                        mapped(str(path), starts[name], plain.shape, plain.dtype).copy_(plain)
                    tally.moved_here(tensor.nbytes)
                else:
                    whole = tensor.detach().redistribute(tensor._spec.mesh, boxed(tensor._spec.placements))
                    where = [os.fsencode(path), starts[name], name]
                    in_place.run("dtorch.write_part", [whole, tally.count(whole._spec.mesh)], where, (1,))
                tally.issued(tensor.nbytes)
        return tally.finish()
