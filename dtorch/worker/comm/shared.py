"""Transfers between the workers of one machine, through the memory they share.

A publisher copies its tensor into its arena once and leaves an *entry* for each other member of the group; a reader waits for
those it reads from, and puts its result together straight out of their arenas. Two processes number the transfers they both
take part in, each for itself: commands come to all in one order, so they agree, and no group needs a name or a world.

A publisher waits for nobody until `CREDIT` of its publications wait for one reader, or too many bytes for any. That
cannot deadlock: whoever is furthest behind in the order of commands waits for nobody, for all others have published what it
reads and it has read what they published.
"""

from __future__ import annotations

from array import array
from collections import deque

import torch

from ...sharding.rearrange import Shift
from ...sharding.transfer import Transfer
from ..assemble import assemble
from ..poison import Poison
from .arena import FIRST_DEVICE, Arena, Region
from .control import CREDIT, ENTRY, Control

# An entry: [transfer's number, offset, poison's device or -1, poison's sequence number, number of dims, *shape]
_HEADER = 5
_MAX_DIMS = ENTRY - _HEADER
_WAITING_BYTES = 1 << 28
_CPU = torch.device("cpu")

Reader = tuple[int, int, int]
"""A reader of a publication: (device, index of its departure word, the transfer's number with it)."""


class SharedMemory:
    """One device's communicator.

    Args:
        fd: the segment (`dtorch.worker.comm.arena.create_segment`).
    """

    def __init__(self, fd: int, control: Control, device: int) -> None:
        self._fd = fd
        self._control = control
        self._device = device
        self._regions: dict[int, Region] = {}
        self._arena = Arena(self._region(device))
        self._counts: dict[int, int] = {}
        # What others have yet to read: (offset, bytes, readers).
        self._published: list[tuple[int, int, list[Reader]]] = []
        # Shifts that have started and not ended, each with its number with either neighbour.
        self._shifts: deque[dict[int, int]] = deque()

    def carry(
        self, move: Transfer | Shift, value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison | None:
        """`transfer`, or one end of a shift."""
        if isinstance(move, Transfer):
            return self.transfer(move, value, sequence)
        if move.starts:
            self._start(move, value, sequence)
            return None
        return self._finish(move)

    def transfer(
        self, transfer: Transfer, value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison | None:
        """This device's part of ``transfer``, of which it holds ``value``: the result, None if it gets none.

        An error that it raises is this device's alone: the others get the `Poison` of command ``sequence``.
        """
        peers = self._begin(transfer)
        try:
            if transfer.publishes:
                self._publish(peers, value, Poison((self._device, sequence)))
            return self._collect(transfer, value)
        finally:
            self._end(peers)

    def _start(self, shift: Shift, value: torch.Tensor | Poison | None, sequence: int) -> None:
        """Let the next device of the ring read ``value``; it looks for it when the shift ends there.

        What this device has published before, but for shifts that are still under way, must have been read by then: a ring
        keeps one block here beside those that are computed on. All of it stands before this in the order of commands, so the
        wait cannot deadlock.
        """
        peers = self._begin(shift)
        numbers = {peer: self._counts[peer] for peer in peers}
        try:
            self._await_readers(len(self._published) - len(self._shifts))
            self._publish([shift.receiver], value, Poison((self._device, sequence)))
        finally:
            self._shifts.append(numbers)

    def _finish(self, shift: Shift) -> torch.Tensor | Poison:
        numbers = self._shifts.popleft()
        try:
            found = self._read(shift.sender, shift.dtype, numbers[shift.sender])
            if isinstance(found, Poison):
                return found
            on_cpu = shift.device_type == "cpu"
            return found.clone() if on_cpu else found.to(torch.device(shift.device_type, self._device), copy=True)
        finally:
            self._end(list(numbers), numbers)

    def _begin(self, transfer: Transfer | Shift) -> list[int]:
        """Number the transfer with each of the others in its group."""
        counts = self._counts
        peers = [device for device in transfer.group if device != self._device]
        for peer in peers:
            counts[peer] = counts.get(peer, 0) + 1
        return peers

    def _end(self, peers: list[int], numbers: dict[int, int] | None = None) -> None:
        """Nothing more will be read in this transfer, or in the one of these numbers, be it done or failed."""
        control, me = self._control, self._device
        for peer in peers:
            control.words[control.departure(me, peer)] = (numbers or self._counts)[peer]
        control.announce(me)

    def _publish(self, peers: list[int], value: torch.Tensor | Poison | None, failure: Poison) -> None:
        """Let ``peers`` read ``value``, or ``failure`` if that fails."""
        readers = self._readers(peers)
        entry = _poisoned(failure)
        try:
            if isinstance(value, Poison):
                entry = _poisoned(value)
            elif value is None or value.ndim > _MAX_DIMS:
                what = "nothing" if value is None else f"a tensor of {value.ndim} dims"
                raise ValueError(f"device {self._device} cannot send {what}; the limit is {_MAX_DIMS} dims")
            else:
                entry = array("q", [self._copy_in(value, readers), -1, 0, value.ndim, *value.shape])
        finally:
            self._announce(readers, entry)

    def _readers(self, peers: list[int]) -> list[Reader]:
        """``peers``, once they are all within the credit."""
        control, me = self._control, self._device
        readers = [(peer, control.departure(peer, me), self._counts[peer]) for peer in peers]
        for peer, word, number in readers:
            control.wait(peer, word, number - CREDIT)
        return readers

    def _announce(self, readers: list[Reader], entry: array) -> None:
        control, words, me = self._control, self._control.words, self._device
        for peer, _, number in readers:
            at = control.entry(me, peer, number)
            words[at + 1 : at + 1 + len(entry)] = entry  # type: ignore[assignment]
            words[at] = number
        control.announce(me)

    def _copy_in(self, value: torch.Tensor, readers: list[Reader]) -> int:
        """Copy ``value`` into a block of the arena, and have it freed when all have read it; its offset."""
        nbytes = value.nbytes
        if not nbytes:
            return 0
        words = self._control.words
        waiting = 0
        still: list[tuple[int, int, list[Reader]]] = []
        for block in self._published:
            if all(words[word] >= number for _, word, number in block[2]):
                self._arena.free(block[0])
            else:
                still.append(block)
                waiting += block[1]
        self._published = still
        if not self._shifts:  # a shift's reader may first wait for what is to be published here
            while still and waiting + nbytes > _WAITING_BYTES:
                waiting -= still[0][1]
                self._await_readers(1)
        offset = self._arena.allocate(nbytes)
        still.append((offset, nbytes, readers))  # also if copying fails: its readers depart all the same
        self._arena.region.view(offset, tuple(value.shape), value.dtype).copy_(value)
        return offset

    def _await_readers(self, count: int) -> None:
        """Wait until the ``count`` oldest publications have been read, and free them."""
        for _ in range(count):
            offset, _, readers = self._published.pop(0)
            for peer, word, number in readers:
                self._control.wait(peer, word, number)
            self._arena.free(offset)

    def _collect(self, transfer: Transfer, value: torch.Tensor | Poison | None) -> torch.Tensor | Poison | None:
        if transfer.shape is None:
            return None
        sources: dict[int, torch.Tensor] = {}
        for term in transfer.terms:
            for piece in term:
                if piece.device in sources:
                    continue
                mine = piece.device == self._device
                source = value if mine else self._read(piece.device, transfer.dtype, self._counts[piece.device])
                if not isinstance(source, torch.Tensor):
                    return source
                sources[piece.device] = source.cpu()
        result = assemble(transfer, sources.__getitem__, _CPU)
        return result if transfer.target_type == "cpu" else result.to(torch.device(transfer.target_type, self._device))

    def _read(self, peer: int, dtype: torch.dtype, number: int) -> torch.Tensor | Poison:
        """What ``peer`` has published for the ``number``-th transfer with it, in its own memory."""
        offset, found = self._entry(peer, number)
        return found if isinstance(found, Poison) else self._region(peer).view(offset, found, dtype)

    def _entry(self, peer: int, number: int) -> tuple[int, tuple[int, ...] | Poison]:
        """The offset and shape of what ``peer`` has published for their ``number``-th transfer, or why there is none; waits for it."""
        at = self._control.entry(peer, self._device, number)
        self._control.wait(peer, at, number)
        words = self._control.words
        if words[at + 2] >= 0:
            return 0, Poison((words[at + 2], words[at + 3]))
        return words[at + 1], tuple(words[at + _HEADER : at + _HEADER + words[at + 4]])

    def _region(self, device: int) -> Region:
        found = self._regions.get(device)
        if found is None:
            found = self._regions[device] = Region(self._fd, FIRST_DEVICE + device)
        return found


def _poisoned(poison: Poison) -> array:
    return array("q", [0, *poison.origin, 0])
