"""Transfers over gloo's sockets, where there is no room for arenas: slower, and nothing overlaps.

What each device holds, or that it failed, is told through the control page, as with `ProcessGroups`. What would begin early and end late
is done where it begins: then each transfer is one meeting of its group, in the one order that all of them share.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ... import memory_pool
from ...sharding.rearrange import Shift
from ...sharding.transfer import Half, Transfer
from ..poison import Poison
from .control import Control
from .links import WHOLE, poisoned
from .process_groups import ProcessGroups


def gloo(store: Any, rank: int, size: int) -> Any:
    """A gloo group of this machine's processes."""
    from torch._C import _distributed_c10d as c10d

    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return c10d.ProcessGroupGloo(store, rank, size, options)


class Sockets(ProcessGroups):
    """One device's communicator. See `ProcessGroups` for the arguments."""

    def __init__(self, fd: int, control: Control, device: int, directory: str, *, limit: int | None = None) -> None:
        super().__init__(fd, control, device, directory, gloo, torch.device("cpu"))
        # Results of what has begun and is to end.
        self._begun: deque[torch.Tensor | Poison | None] = deque()

    def carry(
        self, move: Transfer | Half | Shift, value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison | None:
        """See `SharedMemory.carry`."""
        if isinstance(move, Transfer):
            return self.transfer(move, value, sequence)
        if not move.starts:
            return self._begun.popleft()
        result: torch.Tensor | Poison | None = Poison((self._device, sequence))
        try:
            whole = self.transfer(move.transfer, value, sequence) if isinstance(move, Half) else self._hop(move, value)
            result = whole
        finally:
            self._begun.append(result)
        return None

    def transfer(
        self, transfer: Transfer, value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison | None:
        """See `SharedMemory.transfer`."""
        result = self._by_group(transfer, value.cpu() if isinstance(value, torch.Tensor) else value, sequence)
        if transfer.target_type == "cpu" or not isinstance(result, torch.Tensor):
            return result
        return result.to(torch.device(transfer.target_type, self._device))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """See `SharedMemory.empty`: a tensor like any other."""
        return memory_pool.empty(shape, dtype)

    def _hop(self, shift: Shift, value: torch.Tensor | Poison | None) -> torch.Tensor | Poison:
        """Send ``value`` to the next device of the ring, and get what the one before has."""
        links = self._board.begin(shift.group)
        try:
            self._board.readers(links)
            sent = value.cpu().resolve_conj().resolve_neg().contiguous() if isinstance(value, torch.Tensor) else None
            assert isinstance(value, (torch.Tensor, Poison))
            entry = (
                poisoned(value) if isinstance(value, Poison) else array("q", (0, WHOLE, 0, value.ndim, *value.shape))
            )
            self._board.show([self._board.links[shift.receiver]], entry)
            told = self._told(self._board.links[shift.sender])
            found = told if isinstance(told, Poison) else memory_pool.empty(told, shift.dtype)
            # Whoever comes first sees to its groups in the same order, so that nobody waits for one in a circle.
            groups = {
                peer: self._group(tuple(sorted((self._device, peer))))
                for peer in sorted({shift.sender, shift.receiver})
            }
            work = []
            if sent is not None and sent.numel():
                work.append(groups[shift.receiver].send([_bytes(sent)], int(shift.receiver > self._device), 0))
            if isinstance(found, torch.Tensor) and found.numel():
                work.append(groups[shift.sender].recv([_bytes(found)], int(shift.sender > self._device), 0))
            for one in work:
                one.wait()
        finally:
            self._board.end(links)
        if isinstance(found, Poison) or shift.device_type == "cpu":
            return found
        return found.to(torch.device(shift.device_type, self._device))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
