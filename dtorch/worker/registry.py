"""Device functions: dtorch's own instructions (`dtorch.program.ir.Local`), which know where their device stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import REPLICATE, Placement, is_packed
from ..sharding.layout import Box, local_box, local_shape

DEVICE_FUNCTIONS: dict[str, Callable[..., Any]] = {}
#: The positional arguments that a function writes in place (none, for most).
WRITES: dict[str, tuple[int, ...]] = {}


def device_function(name: str, writes: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``function(here, *args, **kwargs)`` as the meaning of ``Local(name)``; it returns a tensor or a tuple of them.

    Args:
        writes: the positions in ``args`` of tensors that it writes in place.

    Example::

        >>> @device_function("dtorch.doctest_offset")
        ... def offset(here, x, dim):
        ...     return x + here.input_box(0)[dim][0]
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if name in DEVICE_FUNCTIONS:
            raise ValueError(f"device function {name!r} is registered already")
        DEVICE_FUNCTIONS[name] = function
        WRITES[name] = writes
        return function

    return register


class Here:
    """Where a device function runs: the mesh, this device's coordinate, and its boxes of the layouts of the `Local`.

    Args:
        mesh: the program's mesh.
        coordinate: this device's, one index an axis.
        device: where tensors made here belong.
        inputs: (placements, global shape) of each of the instruction's ``inputs``.
        outputs: the same of its ``outputs``.
    """

    __slots__ = ("mesh", "coordinate", "device", "inputs", "outputs")

    def __init__(
        self,
        mesh: DeviceMesh,
        coordinate: tuple[int, ...],
        device: torch.device,
        inputs: Sequence[tuple[Sequence[Placement], Sequence[int]]] = (),
        outputs: Sequence[tuple[Sequence[Placement], Sequence[int]]] = (),
    ) -> None:
        self.mesh = mesh
        self.coordinate = coordinate
        self.device = device
        self.inputs = inputs
        self.outputs = outputs

    def input_box(self, index: int = 0) -> Box:
        """This device's box of input layout ``index``, in global indices."""
        placements, shape = self.inputs[index]
        return local_box(placements, self.mesh.shape, self.coordinate, shape)

    def input_range(self, dim: int) -> tuple[int, int]:
        """This device's range of one dim of the first input layout, whatever packs others; the dim itself must not be packed."""
        placements, shape = self.inputs[0]
        others_whole = [REPLICATE if is_packed(p) and p.dim != dim else p for p in placements]  # type: ignore[attr-defined]
        return local_box(others_whole, self.mesh.shape, self.coordinate, shape)[dim]

    def output_box(self, index: int = 0) -> Box:
        """This device's box of output layout ``index``, in global indices."""
        placements, shape = self.outputs[index]
        return local_box(placements, self.mesh.shape, self.coordinate, shape)

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """The shape of this device's part of output layout ``index``; the global shape is ``outputs[index][1]``."""
        placements, shape = self.outputs[index]
        return local_shape(placements, self.mesh.shape, self.coordinate, shape)
