"""Transfers between the workers of one machine, through the memory they share.

A publisher copies its tensor into its arena once and leaves an *entry* for each other member of the group; a reader waits for
those it reads from, and puts its result together straight out of their arenas. Two processes number the transfers they both
take part in, each for itself: commands come to all in one order, so they agree, and no group needs a name or a world.

A publisher waits for nobody until `CREDIT` of its publications wait for one reader, or too many bytes for any. That
cannot deadlock: whoever is furthest behind in the order of commands waits for nobody, for all others have published what it
reads and it has read what they published.

An all-reduce of more than a little is different: each member reduces a share of it and writes that into every member's block, where
each one's result then is. What members wait for there, in turns, is each other in that same transfer.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Sequence

import torch

from ...errors import WorkerLost
from ...raw import copy
from ...sharding.rearrange import Shift
from ...sharding.transfer import Half, Transfer
from ..assemble import assemble
from ..poison import Poison
from .all_reduce import chunks_of, fill, reduce_shares
from .arena import FIRST_DEVICE, Arena, Region
from .control import ANNOUNCED, COUNTED, CREDIT, ENTRY, Control

# An entry: [how far, offset, poison's device or -1, poison's sequence number, number of dims, *shape]
_HEADER = 5
_MAX_DIMS = ENTRY - _HEADER
_WAITING_BYTES = 1 << 28
_KEPT_VIEWS = 1024
# All-reduces of more bytes than this are made in shares, by two processes and by more: below, everybody adds up everything, which saves
# a wait (`python -m benchmarks collectives`).
_SHARED_OUT = (1 << 17, 1 << 15)
_CPU = torch.device("cpu")

Reader = tuple[int, int, int]
"""A reader of a publication: (device, index of its departure word, what stands there once it has read)."""


class Link:
    """What one device's transfers with another need to know.

    Attributes:
        count: of the transfers that both take part in.
        arrivals: index of the other's ring of entries for this device.
        entries: index of this device's ring of entries for the other.
        leave: index of the word that says how far this device is with the other; ``left``, the other with this one.
        views: what the other has published before, by what its entry and the dtype were.
    """

    __slots__ = ("arrivals", "count", "entries", "leave", "left", "peer", "region", "views")

    def __init__(self, fd: int, control: Control, device: int, peer: int) -> None:
        self.peer = peer
        self.count = 0
        self.arrivals = control.entries(peer, device)
        self.entries = control.entries(device, peer)
        self.leave = control.departure(device, peer)
        self.left = control.departure(peer, device)
        self.region = Region(fd, FIRST_DEVICE + peer)
        self.views: dict[tuple, torch.Tensor] = {}


class SharedMemory:
    """One device's communicator.

    Args:
        fd: the segment (`dtorch.worker.comm.arena.create_segment`).
    """

    def __init__(self, fd: int, control: Control, device: int) -> None:
        self._fd = fd
        self._control = control
        self._device = device
        self._arena = Arena(Region(fd, FIRST_DEVICE + device))
        self._links: dict[int, Link] = {}
        self._groups: dict[tuple[int, ...], list[Link]] = {}
        # Tensors that `empty` has made and nothing has been done with: their offsets, by where they are in memory.
        self._made_here: dict[int, int] = {}
        # What others have yet to read: (offset, bytes, readers).
        self._published: list[tuple[int, int, list[Reader]]] = []
        # Shifts and halves of transfers that have started and not ended, each with its number with each of the others.
        self._under_way: deque[dict[int, int]] = deque()

    def carry(
        self, move: Transfer | Shift, value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison | None:
        """`transfer`, or one end of it, or of a shift."""
        if isinstance(move, Transfer):
            return self.transfer(move, value, sequence)
        if isinstance(move, Half):
            return self._begin_half(move, value, sequence) if move.starts else self._end_half(move, value)
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
        links = self._begin(transfer.group)
        try:
            if transfer.is_all_reduce and _is_shared_out(transfer):
                return self._all_reduce(transfer, links, value, sequence)
            if transfer.publishes:
                self._publish(links, value, sequence)
            return self._collect(transfer, value)
        finally:
            self._end(links)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in shared memory, for what is only computed to be transferred: that then copies nothing in.

        Nobody may read or write it after it has been given to `carry`: an all-reduce puts its result there.
        """

        def forget(offset: int) -> None:
            self._made_here.pop(place, None)

        offset, tensor = self._arena.tensor(shape, dtype, forget)
        place = tensor.data_ptr()
        self._made_here[place] = offset
        return tensor

    def _offset_of(self, value: torch.Tensor) -> int | None:
        """Where in the arena ``value`` is, if `empty` has made it; from now on it did not."""
        if not self._made_here or value.data_ptr() not in self._made_here:
            return None
        if not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes:
            return None
        return self._made_here.pop(value.data_ptr())

    def _start(self, shift: Shift, value: torch.Tensor | Poison | None, sequence: int) -> None:
        """Let the next device of the ring read ``value``; it looks for it when the shift ends there.

        What this device has published before, but for shifts that are still under way, must have been read by then: a ring
        keeps one block here beside those that are computed on. All of it stands before this in the order of commands, so the
        wait cannot deadlock.
        """
        numbers = {link.peer: link.count for link in self._begin(shift.group)}
        try:
            self._await_readers(len(self._published) - len(self._under_way))
            self._publish([self._links[shift.receiver]], value, sequence)
        finally:
            self._under_way.append(numbers)

    def _finish(self, shift: Shift) -> torch.Tensor | Poison:
        numbers = self._under_way.popleft()
        try:
            found = self._read(self._links[shift.sender], shift.dtype, numbers[shift.sender])
            if isinstance(found, Poison):
                return found
            on_cpu = shift.device_type == "cpu"
            return found.clone() if on_cpu else found.to(torch.device(shift.device_type, self._device), copy=True)
        finally:
            self._leave(numbers)

    def _begin_half(self, half: Half, value: torch.Tensor | Poison | None, sequence: int) -> None:
        """Let the others read ``value`` from now on: what `transfer` does first."""
        links = self._begin(half.group)
        try:
            if half.transfer.publishes:
                self._publish(links, value, sequence)
        finally:
            self._under_way.append({link.peer: link.count for link in links})

    def _end_half(self, half: Half, value: torch.Tensor | Poison | None) -> torch.Tensor | Poison | None:
        """Read what the others have let this one read: what `transfer` does then. Of an all-reduce, too, each reads all."""
        numbers = self._under_way.popleft()
        try:
            return self._collect(half.transfer, value, numbers)
        finally:
            self._leave(numbers)

    def _leave(self, numbers: dict[int, int]) -> None:
        """Nothing more will be read in the transfers of these numbers."""
        for peer, number in numbers.items():
            self._control.words[self._links[peer].leave] = number * COUNTED
        self._control.announce(self._device)

    def _begin(self, group: tuple[int, ...]) -> list[Link]:
        """Number the transfer with each of the others in its group."""
        links = self._groups.get(group)
        if links is None:
            links = self._groups[group] = [self._link(peer) for peer in group if peer != self._device]
        for link in links:
            link.count += 1
        return links

    def _end(self, links: list[Link]) -> None:
        """Nothing more will be read in this transfer, be it done or failed."""
        words = self._control.words
        for link in links:
            words[link.leave] = link.count * COUNTED
        self._control.announce(self._device)

    # Publishing

    def _publish(self, links: list[Link], value: torch.Tensor | Poison | None, sequence: int) -> None:
        """Let others read ``value``, or the failure of command ``sequence`` if that fails."""
        readers = self._readers(links)
        entry = None
        try:
            if isinstance(value, Poison):
                entry = _poisoned(value)
            else:
                value = self._sendable(value)
                entry = array("q", (self._copy_in(value, readers), -1, 0, value.ndim, *value.shape))
        finally:
            self._announce(links, entry or _poisoned(Poison((self._device, sequence))))

    def _sendable(self, value: torch.Tensor | None) -> torch.Tensor:
        if value is None or value.ndim > _MAX_DIMS:
            what = "nothing" if value is None else f"a tensor of {value.ndim} dims"
            raise ValueError(f"device {self._device} cannot send {what}; the limit is {_MAX_DIMS} dims")
        return value

    def _readers(self, links: list[Link]) -> list[Reader]:
        """The others, once they are all within the credit."""
        control = self._control
        for link in links:
            control.wait(link.peer, link.left, (link.count - CREDIT) * COUNTED)
        return [(link.peer, link.left, link.count * COUNTED) for link in links]

    def _announce(self, links: list[Link], entry: array, part: int = COUNTED) -> None:
        """Show ``entry``; of what it tells of, as much is there as ``part`` says."""
        control, words = self._control, self._control.words
        size = len(entry)
        for link in links:
            at = link.entries + link.count % CREDIT * ENTRY
            words[at + 1 : at + 1 + size] = entry  # type: ignore[assignment]
            words[at] = (link.count - 1) * COUNTED + part
        control.announce(self._device)

    def _copy_in(self, value: torch.Tensor, readers: list[Reader]) -> int:
        """Copy ``value`` into a block of the arena, and have it freed when all have read it; its offset."""
        nbytes = value.nbytes
        if not nbytes:
            return 0
        waiting = self._free_read()
        if not self._under_way:  # whoever reads what is under way may first wait for what is to be published here
            while self._published and waiting + nbytes > _WAITING_BYTES:
                waiting -= self._published[0][1]
                self._await_readers(1)
        made_here = self._offset_of(value)
        if made_here is not None:
            self._arena.share(made_here)
            self._published.append((made_here, nbytes, readers))
            return made_here
        offset = self._arena.allocate(nbytes)
        self._published.append((offset, nbytes, readers))  # also if copying fails: its readers depart all the same
        copy(self._arena.region.view(offset, tuple(value.shape), value.dtype), value)
        return offset

    def _free_read(self) -> int:
        """Free what has been read; the bytes that have not."""
        words, waiting = self._control.words, 0
        still: list[tuple[int, int, list[Reader]]] = []
        for block in self._published:
            for _, word, done in block[2]:
                if words[word] < done:
                    still.append(block)
                    waiting += block[1]
                    break
            else:
                self._arena.free(block[0])
        self._published = still
        return waiting

    def _await_readers(self, count: int) -> None:
        """Wait until the ``count`` oldest publications have been read, and free them."""
        for _ in range(count):
            offset, _, readers = self._published.pop(0)
            for peer, word, done in readers:
                self._control.wait(peer, word, done)
            self._arena.free(offset)

    # Reading

    def _collect(
        self, transfer: Transfer, value: torch.Tensor | Poison | None, numbers: dict[int, int] | None = None
    ) -> torch.Tensor | Poison | None:
        if transfer.shape is None:
            return None
        sources: dict[int, torch.Tensor] = {}
        for device in transfer.sources:
            if device == self._device:
                source = value
            else:
                link = self._links[device]
                source = self._read(link, transfer.dtype, link.count if numbers is None else numbers[device])
            if not isinstance(source, torch.Tensor):
                return source
            sources[device] = source if transfer.source_type == "cpu" else source.cpu()
        result = assemble(transfer, sources.__getitem__, _CPU)
        return result if transfer.target_type == "cpu" else result.to(torch.device(transfer.target_type, self._device))

    def _read(self, link: Link, dtype: torch.dtype, number: int) -> torch.Tensor | Poison:
        """What the other has published for the ``number``-th transfer with it, in its own memory."""
        at = link.arrivals + number % CREDIT * ENTRY
        self._control.wait(link.peer, at, number * COUNTED)
        return self._published_at(link, at, dtype)

    def _published_at(self, link: Link, at: int, dtype: torch.dtype) -> torch.Tensor | Poison:
        """What the entry at ``at`` tells of."""
        words = self._control.words
        if words[at + 2] >= 0:
            return shape_at(words, at)  # type: ignore[return-value]
        shape = words[at + _HEADER : at + _HEADER + words[at + 4]]
        key = words[at + 1], shape.tobytes(), dtype
        view = link.views.get(key)
        if view is None:
            if len(link.views) >= _KEPT_VIEWS:
                link.views.clear()
            view = link.views[key] = link.region.view(words[at + 1], tuple(shape), dtype)
        return view

    def _link(self, peer: int) -> Link:
        found = self._links.get(peer)
        if found is None:
            found = self._links[peer] = Link(self._fd, self._control, self._device, peer)
        return found

    # All-reduce in shares

    def _all_reduce(
        self, transfer: Transfer, links: list[Link], value: torch.Tensor | Poison | None, sequence: int
    ) -> torch.Tensor | Poison:
        """The whole reduction, in a block of this device's arena.

        The n-th of n chunks is copied in while the others copy in theirs, but for this device's share of it: that is reduced
        out of ``value`` and the others' blocks, and written to all blocks. What `empty` made is such a block already.
        """
        control, shape = self._control, transfer.shape
        assert shape is not None
        chunks = chunks_of(
            math.prod(shape), transfer.dtype.itemsize, transfer.sources.index(self._device), len(transfer.sources)
        )
        self._readers(links)
        entry = result = None
        there = ANNOUNCED
        try:
            if isinstance(value, Poison):
                entry = _poisoned(value)
            else:
                value = self._sendable(value)
                if value.shape != shape:
                    raise ValueError(f"an addend of shape {tuple(value.shape)} where {shape} was planned")
                offset = self._offset_of(value)
                if offset is not None:
                    result, there = value, COUNTED - 1
                else:
                    offset, result = self._arena.tensor(shape, transfer.dtype)
                own = value.resolve_conj().resolve_neg().contiguous().view(-1)
                if result is not value:
                    fill(result.view(-1), own, chunks[0])
                    there = ANNOUNCED + 1
                entry = array("q", (offset, -1, 0, value.ndim, *shape))
        finally:
            self._announce(links, entry or _poisoned(Poison((self._device, sequence))), there)
        blocks: list[torch.Tensor] = []
        poisons = []
        for device in transfer.sources:
            if device == self._device:
                source = value if result is None else result
            else:
                link = self._links[device]
                at = link.arrivals + link.count % CREDIT * ENTRY
                control.wait(device, at, (link.count - 1) * COUNTED + ANNOUNCED)
                source = self._published_at(link, at, transfer.dtype)
            if isinstance(source, Poison):
                poisons.append(source)
            else:
                blocks.append(source.view(-1))  # type: ignore[union-attr]
        if poisons:
            return poisons[0]
        assert result is not None
        try:
            reduce_shares(self._control, self._device, transfer, links, own, blocks, chunks)
        except Exception as error:  # the others' blocks are half written: there is no way on from here
            raise WorkerLost(f"an all-reduce of devices {transfer.group} failed: {error}") from error
        self._end(links)
        for link in links:
            control.wait(link.peer, link.left, link.count * COUNTED)
        return result


def shape_at(words: memoryview, at: int) -> tuple[int, ...] | Poison:
    """The shape that the entry at ``at`` tells of, or the poison."""
    if words[at + 2] >= 0:
        return Poison((words[at + 2], words[at + 3]))
    return tuple(words[at + _HEADER : at + _HEADER + words[at + 4]])


def _is_shared_out(transfer: Transfer) -> bool:
    assert transfer.shape is not None
    nbytes = math.prod(transfer.shape) * transfer.dtype.itemsize
    return nbytes > _SHARED_OUT[len(transfer.group) > 2]


def _poisoned(poison: Poison) -> array:
    return array("q", (0, *poison.origin, 0))
