"""Transfers between cuda devices, over NCCL; all others go through shared memory.

Not run on GPUs yet: the machine it was written on has none. `tests/worker/test_comm.py` runs it over gloo.

Every member first says through the control page what it holds, so a poison travels in band here too and nobody enters a
collective that another will not; then each publisher in turn broadcasts its part to the group. Groups are built directly
from (store, rank, size) when first needed: there is no world.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch

from ...errors import WorkerLost
from ...sharding.transfer import Transfer
from ..assemble import assemble
from ..poison import Poison
from .control import COUNTED, CREDIT, ENTRY, Control
from .links import Link, shape_at
from .shared import SharedMemory

MakeGroup = Callable[[Any, int, int], Any]
"""From (store, rank, size) to a c10d backend."""


def nccl(store: Any, rank: int, size: int) -> Any:
    """An NCCL group."""
    from torch._C import _distributed_c10d as c10d

    if not hasattr(c10d, "ProcessGroupNCCL"):
        raise WorkerLost("this build of torch has no NCCL, which transfers between cuda devices need")
    return c10d.ProcessGroupNCCL(store, rank, size, c10d.ProcessGroupNCCL.Options())


class ProcessGroups(SharedMemory):
    """One device's communicator.

    Args:
        directory: where the members of a group meet, by files.
        make_group: what carries the bytes.
        where: this device's accelerator.
        limit: see `SharedMemory`.
    """

    def __init__(
        self,
        fd: int,
        control: Control,
        device: int,
        directory: str,
        make_group: MakeGroup = nccl,
        where: torch.device | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(fd, control, device, limit)
        self._directory = directory
        self._make_group = make_group
        self._where = where or torch.device("cuda", device)
        self._backends: dict[tuple[int, ...], Any] = {}

    def transfer(
        self, transfer: Transfer, value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison | None:
        """See `SharedMemory.transfer`."""
        if transfer.source_type == "cpu" or transfer.target_type == "cpu":
            return super().transfer(transfer, value, sequence)
        return self._by_group(transfer, value, sequence)

    def _by_group(
        self, transfer: Transfer, value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison | None:
        """The transfer by broadcasts of all that anybody publishes."""
        links = self._board.begin(transfer.group)
        try:
            if transfer.publishes and isinstance(value, torch.Tensor):
                entry = [0, -1, 0, value.ndim, *value.shape]
            else:  # of a member that does not publish, nobody will look at the poison
                entry = [0, *(value.origin if isinstance(value, Poison) else (self._device, sequence)), 0]
            self._board.readers(links)
            self._board.show(links, array("q", entry))
            held: dict[int, torch.Tensor | Poison | None] = {}
            for rank, member in enumerate(transfer.group):
                if member == self._device:
                    held[member] = value
                    sends = transfer.publishes and isinstance(value, torch.Tensor)
                    part = value.resolve_conj().resolve_neg().contiguous() if sends else None  # type: ignore[union-attr]
                else:
                    found = self._told(self._board.links[member])
                    part = None if isinstance(found, Poison) else self._empty(found, transfer.dtype)
                    held[member] = found if isinstance(found, Poison) else part
                if part is not None and part.numel():
                    self._broadcast(transfer.group, part, rank)
        finally:
            self._board.end(links)
        if transfer.shape is None:
            return None
        for piece in (piece for term in transfer.terms for piece in term):
            if not isinstance(held[piece.device], torch.Tensor):
                return held[piece.device]
        return assemble(transfer, held.__getitem__, self._where)  # type: ignore[arg-type]

    def _told(self, link: Link) -> tuple[int, ...] | Poison:
        """The shape of what the other publishes, or why it does not."""
        at = link.arrivals + link.count % CREDIT * ENTRY
        self._control.wait(link.peer, at, link.count * COUNTED)
        return shape_at(self._control.words, at)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._where)

    def _broadcast(self, devices: tuple[int, ...], part: torch.Tensor, rank: int) -> None:
        from torch._C import _distributed_c10d as c10d

        options = c10d.BroadcastOptions()
        options.rootRank = rank
        try:
            self._group(devices).broadcast([part.reshape(-1).view(torch.uint8)], options).wait()
        except Exception as error:  # the others are in it: there is no way on from here
            raise WorkerLost(f"a collective of devices {devices} failed: {error}") from error

    def _group(self, devices: tuple[int, ...]) -> Any:
        """The backend of these devices, sorted."""
        from torch._C import _distributed_c10d as c10d

        group = self._backends.get(devices)
        if group is None:
            name = "-".join(map(str, devices))
            store = c10d.FileStore(f"{self._directory}/group-{name}", len(devices))
            group = self._backends[devices] = self._make_group(store, devices.index(self._device), len(devices))
        return group
