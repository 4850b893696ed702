"""A large value from the client to workers that have nothing else to do, through a few slots that stay in the caches.

The client copies slab after slab into the slots, in turn, and workers copy out what they want of each meanwhile. So the value is
read from memory once and written once, where a copy in and a copy out of a block go to memory twice. The client waits for slots, in all,
about as long as its copies take: a worker may be asleep, or dead. Then the rest goes into a block of its own, and nobody is waited for.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence

import torch

from ...raw import copy
from ...sharding.layout import Box, box_shape
from ..assemble import cut
from .arena import Region
from .control import CLIENT_DEVICE, NEVER, REST, SHOWN, Control
from .streams import Slabs, common, within

SLOTS = 4
#: Two workers on 2 cores, each with 1 MB of cache, and 32 MB of both: 256 MB take 31 ms; in slabs of 1 MB 37, of 4 MB 46, in one go 47.
SLOT_BYTES = 1 << 21
RING_BYTES = SLOTS * SLOT_BYTES
#: Smaller values are there about as soon as the workers are awake.
SMALLEST_BYTES = 1 << 25
#: A slab takes longer.
_SLAB_SECONDS = 80e-6
#: Client and workers may be more than the cores: who looks for long keeps others from copying.
_AWAKE_SECONDS = 0.0
#: The client's patience: as many bytes a second are copied at least.
_PATIENCE = 10e9


class Source:
    """The client's end.

    Args:
        region: the client's.
        offset: of the ring in it.
    """

    def __init__(self, control: Control, region: Region, offset: int) -> None:
        self._control = control
        self._region = region
        self._offset = offset
        self._ring = region.bytes(offset, RING_BYTES)
        #: Slabs of all values so far.
        self.shown = 0

    def reference(self, block: Sequence[int]) -> list[int]:
        """What tells workers of the next value, of whose block this is ``[offset, bytes]``. No worker may be reading another one."""
        self._control.words[REST] = NEVER
        return [*block, self._offset, self.shown]

    def pour(self, value: torch.Tensor, block: torch.Tensor, devices: Sequence[int]) -> None:
        """Show all of the contiguous ``value`` to ``devices``, which have been told of it; ``block``: memory for it, too."""
        control, words, first = self._control, self._control.words, self.shown
        slabs = _slabs(tuple(value.shape), value.dtype)
        start = source = value.data_ptr()
        left, spilt = value.nbytes / _PATIENCE, False
        for step in range(1, slabs.count + 1):
            if step > SLOTS and not spilt:
                before = time.perf_counter()
                wanted = first + step - SLOTS
                spilt = not all(
                    control.wait(device, control.taken(device), wanted, before + left, _AWAKE_SECONDS)
                    for device in devices
                )
                left -= time.perf_counter() - before
                if spilt:
                    words[REST] = first + step
            nbytes = math.prod(box_shape(slabs.box(step))) * value.dtype.itemsize
            if spilt:
                place = block.data_ptr() + source - start
            else:
                place = self._ring.data_ptr() + step % SLOTS * SLOT_BYTES
            ctypes.memmove(place, source, nbytes)
            source += nbytes
            self.shown = words[SHOWN] = first + step
            control.announce(CLIENT_DEVICE)


class Sink:
    """A worker's end."""

    def __init__(self, control: Control, region: Region, device: int) -> None:
        self._control = control
        self._region = region
        self._device = device

    def take(
        self, reference: Sequence[int], dtype: torch.dtype, shape: Sequence[int], box: Box, target: torch.Tensor
    ) -> None:
        """Copy ``box`` of the value, of ``shape``, to ``target`` as it comes."""
        offset, nbytes, ring, first = reference
        control, region, device = self._control, self._region, self._device
        words, taken = control.words, control.taken(device)
        slabs = _slabs(tuple(shape), dtype)
        for step in range(1, slabs.count + 1):
            slab = slabs.box(step)
            both = common(slab, box)
            if both is None:
                continue
            words[taken] = first + step - 1
            control.announce(device)
            while (ahead := first + step - words[SHOWN]) > SLOTS:
                time.sleep(ahead * _SLAB_SECONDS)
            control.wait(CLIENT_DEVICE, SHOWN, first + step, awake=_AWAKE_SECONDS)
            if words[REST] <= first + step:
                source = cut(region.bytes(offset, nbytes).view(dtype).view(tuple(shape)), both)
            else:
                memory = region.view(ring + step % SLOTS * SLOT_BYTES, box_shape(slab), dtype)
                source = cut(memory, within(both, slab))
            copy(cut(target, within(both, box)), source, least=0)
        words[taken] = first + slabs.count
        control.announce(device)


def _slabs(shape: tuple[int, ...], dtype: torch.dtype) -> Slabs:
    return Slabs(shape, SLOT_BYTES // dtype.itemsize)
