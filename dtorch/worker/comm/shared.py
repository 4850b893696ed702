"""Transfers between the workers of one machine, through the memory they share.

A publisher copies its tensor into its arena once and leaves an *entry* for each other member of the group; a reader waits for
those it reads from, and puts its result together straight out of their arenas. Two processes number the transfers they both
take part in, each for itself: commands come to all in one order, so they agree, and no group needs a name or a world.

A publisher waits for nobody until `CREDIT` of its publications (of large ones, `LARGE_CREDIT`) wait for one reader, or too many bytes
for any. That cannot deadlock: whoever is furthest behind in the order of commands waits for nobody, for all others have published
what it reads and it has read what they published.

An all-reduce of more than a little is different: each member reduces a share of it and writes that into every member's block, where
each one's result then is. What members wait for there, in turns, is each other in that same transfer. So does a device whose large value is
broadcast: it waits for its readers, for what they read is its own result.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Sequence

import torch

from ... import memory_pool
from ...errors import WorkerLost
from ...raw import copy
from ...sharding.layout import Box
from ...sharding.rearrange import Shift
from ...sharding.transfer import Half, Transfer
from ..assemble import around, assemble, cut
from ..poison import Poison
from .all_reduce import InShares, is_shared_out
from .arena import FIRST_DEVICE, Arena, Region, size_of
from .board import Board
from .broadcast import Broadcasts, is_broadcast
from .control import ANNOUNCED, COUNTED, Control
from .links import GROWING, STREAMED, WHOLE, Link, poisoned, sendable
from .prepared import Prepared, Ring, collector, is_small, publisher, slots_of
from .publications import Publications
from .streams import (
    GROWING_BYTES,
    Incoming,
    Outgoing,
    Window,
    addends_of,
    grow,
    growing,
    reduced,
    slabs_of,
    step_through,
)

_KEPT_TRANSFERS = 4096
#: The part of a limited arena, one n-th, beyond which no slots are made.
_RINGS = 4
_CPU = torch.device("cpu")


class SharedMemory:
    """One device's communicator.

    Args:
        fd: the segment (`dtorch.worker.comm.arena.create_segment`).
        limit: the bytes of its arena. What does not fit in is published slab by slab; None: everything fits.
    """

    def __init__(self, fd: int, control: Control, device: int, limit: int | None = None) -> None:
        self._fd = fd
        self._control = control
        self._device = device
        self._arena = Arena(Region(fd, FIRST_DEVICE + device), limit)
        self._sent = Publications(self._arena, control)
        self._window = None if limit is None else Window(self._arena, control)
        self._board = Board(fd, control, device)
        self._in_shares = InShares(control, device, self._board, self._sent, self._window, self.transfer)
        self._broadcasts = Broadcasts(control, device, self._board, self._sent)
        self._prepared: dict[int, Prepared] = {}
        # By the group they are for and their size.
        self._rings: dict[tuple[tuple[int, ...], int], Ring] = {}
        # Shifts and halves of transfers that have started and not ended, each with its number with each of the others, and what is yet
        # to be published of it.
        self._under_way: deque[tuple[dict[int, int], Outgoing | None]] = deque()

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
        links = self._board.begin(transfer.group)
        try:
            prepared = self._prepared_for(transfer, links, value)
            if prepared.in_shares:
                return self._in_shares.all_reduce(transfer, links, value, sequence)
            if prepared.is_broadcast and isinstance(value, torch.Tensor):
                result = self._broadcasts.broadcast(transfer, links, value)
                if result is not None:
                    return result
            outgoing = self._publish(links, value, sequence, prepared, transfer.kept) if transfer.publishes else None
            return self._collect(transfer, value, outgoing, prepared)
        finally:
            self._board.end(links)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in shared memory, for what is only computed to be transferred: that then copies nothing in.

        Nobody may read or write it after it has been given to `carry`: an all-reduce puts its result there.
        """
        return self._sent.empty(shape, dtype)

    def _start(self, shift: Shift, value: torch.Tensor | Poison | None, sequence: int) -> None:
        """Let the next device of the ring read ``value``; it looks for it when the shift ends there.

        What this device has published before, but for shifts that are still under way, must have been read by then: a ring
        keeps one block here beside those that are computed on. All of it stands before this in the order of commands, so the
        wait cannot deadlock.
        """
        numbers = {link.peer: link.count for link in self._board.begin(shift.group)}
        outgoing = None
        try:
            self._sent.await_readers(len(self._sent.waiting) - len(self._under_way))
            outgoing = self._publish([self._board.links[shift.receiver]], value, sequence, begins=True)
        finally:
            self._under_way.append((numbers, outgoing))

    def _finish(self, shift: Shift) -> torch.Tensor | Poison:
        numbers, outgoing = self._under_way.popleft()
        try:
            link = self._board.links[shift.sender]
            on_cpu = shift.device_type == "cpu"
            found = self._board.read(link, shift.dtype, numbers[link.peer], while_it_grows=on_cpu)
            if isinstance(found, Incoming):
                result = memory_pool.empty(found.slabs.shape, found.dtype)
                found.want(tuple((0, size) for size in result.shape), result)
                self._step_through(outgoing, [found], numbers)
                return result if on_cpu else result.to(torch.device(shift.device_type, self._device))
            self._step_through(outgoing, [], numbers)
            if isinstance(found, Poison):
                return found
            return found.clone() if on_cpu else found.to(torch.device(shift.device_type, self._device), copy=True)
        finally:
            self._board.leave(numbers)

    def _begin_half(self, half: Half, value: torch.Tensor | Poison | None, sequence: int) -> None:
        """Let the others read ``value`` from now on: what `transfer` does first."""
        links = self._board.begin(half.group)
        outgoing = None
        try:
            if half.transfer.publishes:
                prepared = self._prepared_for(half.transfer, links, value)
                outgoing = self._publish(links, value, sequence, prepared, half.transfer.kept, begins=True)
        finally:
            self._under_way.append(({link.peer: link.count for link in links}, outgoing))

    def _end_half(self, half: Half, value: torch.Tensor | Poison | None) -> torch.Tensor | Poison | None:
        """Read what the others have let this one read: what `transfer` does then. Of an all-reduce, too, each reads all."""
        numbers, outgoing = self._under_way.popleft()
        try:
            return self._collect(half.transfer, value, outgoing, self._prepared.get(id(half.transfer)), numbers)
        finally:
            self._board.leave(numbers)

    # Publishing

    def _prepared_for(self, transfer: Transfer, links: list[Link], value: torch.Tensor | Poison | None) -> Prepared:
        """Transfers are kept where they are planned, so one is known by its identity."""
        known = self._prepared.get(id(transfer))
        return known if known and known.is_ready else self._prepare(transfer, links, value)

    def _prepare(self, transfer: Transfer, links: list[Link], value: torch.Tensor | Poison | None) -> Prepared:
        """What is prepared of ``transfer`` now."""
        known = self._prepared.get(id(transfer))
        if known is None:
            if len(self._prepared) >= _KEPT_TRANSFERS:
                self._prepared.clear()
            made = Prepared(transfer, transfer.is_all_reduce and is_shared_out(transfer), is_broadcast(transfer))
        elif isinstance(value, Poison):
            return known
        else:
            publish = collect = None
            shape = None if value is None else value.shape
            if is_small(transfer, value):
                if transfer.publishes and value is not None and (ring := self._ring(transfer.group, value.nbytes)):
                    publish = publisher(self._control, self._device, links, ring, value, transfer.kept)
                if transfer.shape is not None:
                    collect = collector(self._control, self._board.links, transfer, shape, self._board.whole_at)
            made = dataclasses.replace(known, is_ready=True, shape=shape, publish=publish, collect=collect)
        self._prepared[id(transfer)] = made
        return made

    def _ring(self, group: tuple[int, ...], nbytes: int) -> Ring | None:
        """Slots for values of so many bytes, None if there is no room for them."""
        size = size_of(nbytes)
        ring = self._rings.get((group, size))
        if ring is None and self._sent.arena.fits(slots_of(size) * size, _RINGS):
            ring = self._rings[group, size] = Ring(self._sent.arena, size)
        return ring

    def _publish(
        self,
        links: list[Link],
        value: torch.Tensor | Poison | None,
        sequence: int,
        prepared: Prepared | None = None,
        kept: Box | None = None,
        begins: bool = False,
    ) -> Outgoing | None:
        """Let others read ``value``, but for what is ``kept``, or the failure of command ``sequence`` if that fails.

        Returns:
            What there is no room for; it has to be stepped through. ``begins``: that is later, and ``value`` may have changed by then.
        """
        if prepared and prepared.publish and prepared.fits(value) and not self._sent.is_made_here(value):
            try:
                prepared.publish(value)
                return None
            except Exception:  # nothing is shown yet; what follows fails too, and says so
                pass
        readers = self._board.readers(links)
        entry = outgoing = grows = None
        try:
            if isinstance(value, Poison):
                entry = poisoned(value)
            else:
                value = sendable(value, self._device)
                # Whoever reads what is under way may first wait for what is to be published here.
                placed = self._sent.place(value, readers, may_wait=not self._under_way)
                if placed is None:
                    outgoing = self._outgoing(links, value.clone() if begins else value)
                    entry = array(
                        "q", (outgoing.window.offset, STREAMED, outgoing.slabs.elements, value.ndim, *value.shape)
                    )
                elif placed[1] is None or value.nbytes < GROWING_BYTES:
                    offset, block = placed
                    if block is not None:
                        for box in around(value.shape, kept):
                            copy(cut(block, box), cut(value, box))
                    entry = array("q", (offset, WHOLE, 0, value.ndim, *value.shape))
                else:
                    entry = array("q", (placed[0], GROWING, growing(value).elements, value.ndim, *value.shape))
                    grows = placed[1]
        finally:
            part = COUNTED if outgoing is None and grows is None else ANNOUNCED
            self._board.show(links, entry or poisoned(Poison((self._device, sequence))), part)
        if grows is not None:
            try:
                grow(self._control, self._device, links, grows, value, around(value.shape, kept))  # type: ignore[arg-type,union-attr]
            except Exception as error:  # the others read already: there is no way on from here
                raise WorkerLost(f"device {self._device} cannot send {tuple(grows.shape)}: {error}") from error
        return outgoing

    def _outgoing(self, links: list[Link], value: torch.Tensor) -> Outgoing:
        assert self._window is not None
        numbers = {link.peer: link.count for link in links}
        return Outgoing(self._window, value, links, numbers, slabs_of(value, self._window.slab_bytes))

    def _step_through(self, outgoing: Outgoing | None, incoming: list[Incoming], numbers: dict[int, int]) -> None:
        """Publish and read slab by slab what is not there whole, in the transfers of these ``numbers``."""
        links = [self._board.links[peer] for peer in numbers]
        try:
            step_through(self._control, self._device, outgoing, incoming, links, numbers)
        except Exception as error:  # the others wait for slabs: there is no way on from here
            raise WorkerLost(f"a transfer of devices {(self._device, *numbers)} failed: {error}") from error

    # Reading

    def _collect(
        self,
        transfer: Transfer,
        value: torch.Tensor | Poison | None,
        outgoing: Outgoing | None,
        prepared: Prepared | None,
        numbers: dict[int, int] | None = None,
    ) -> torch.Tensor | Poison | None:
        """The result. ``outgoing``: what is yet to be published; ``numbers``: of the transfer, if it is not the last one."""
        if prepared and prepared.collect and not outgoing and prepared.fits(value):
            found = prepared.collect(value, numbers)
            if found is not None:
                return found
        sources: dict[int, torch.Tensor | Incoming] = {}
        result: torch.Tensor | Poison | None = None
        addends = None
        incoming: list[Incoming] = []
        # Addends are combined where they are, without copies.
        while_it_grows = len(transfer.terms) == 1 and transfer.source_type == transfer.target_type == "cpu"
        try:
            for device in transfer.sources:
                if device == self._device:
                    source: torch.Tensor | Poison | Incoming | None = value
                else:
                    link = self._board.links[device]
                    number = link.count if numbers is None else numbers[device]
                    source = self._board.read(link, transfer.dtype, number, while_it_grows)
                if isinstance(source, torch.Tensor):
                    sources[device] = source if transfer.source_type == "cpu" else source.cpu()
                elif isinstance(source, Incoming):
                    sources[device] = source
                    incoming.append(source)
                else:
                    result = source
                    break
            else:
                if incoming:
                    addends = addends_of(transfer, sources)
                elif transfer.shape is not None:
                    result = assemble(transfer, sources.__getitem__, _CPU)  # type: ignore[arg-type]
        finally:
            if outgoing is not None or addends is not None:
                if numbers is None:
                    numbers = {
                        device: self._board.links[device].count for device in transfer.group if device != self._device
                    }
                self._step_through(outgoing, incoming if addends is not None else [], numbers)
        if addends is not None:
            result = reduced(transfer, addends)
        if transfer.target_type == "cpu" or not isinstance(result, torch.Tensor):
            return result
        return result.to(torch.device(transfer.target_type, self._device))
