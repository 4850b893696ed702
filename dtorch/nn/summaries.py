"""`summary`: which device holds how much of a module."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch

from .. import hints
from ..mesh import DeviceMesh
from ..placement import PlacementList
from ..sharding.layout import local_shape
from ..tensor import Tensor
from .distribute import NOTES
from .holdings import Held, held_by

HEAD = ("parameter", "shape", "dtype", "placements", "bytes per device")


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of a module."""

    #: Its names, joined by ``=`` if it is tied.
    name: str
    is_parameter: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: None for a plain tensor, which the client holds.
    mesh: DeviceMesh | None
    placements: PlacementList | None
    #: What each device holds of it.
    bytes_by_device: dict[torch.device, int]

    @property
    def bytes_per_device(self) -> int:
        """What the device with the largest part holds."""
        return max(self.bytes_by_device.values())

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Summary:
    """The table that `summary` makes; prints as one."""

    rows: list[Row]
    #: What `distribute_module` decided where it could not follow the plan.
    notes: list[str] = field(default_factory=list)

    @property
    def bytes_by_device(self) -> dict[torch.device, int]:
        """What each device holds of the module."""
        totals: dict[torch.device, int] = {}
        for row in self.rows:
            for device, size in row.bytes_by_device.items():
                totals[device] = totals.get(device, 0) + size
        return totals

    def __str__(self) -> str:
        meshes = list(dict.fromkeys(row.mesh for row in self.rows if row.mesh is not None))
        lines = [f"mesh {number}: {mesh}" if len(meshes) > 1 else str(mesh) for number, mesh in enumerate(meshes)]
        cells = [HEAD, *(_cells(row, meshes) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            left = "  ".join(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False))
            lines.append(f"{left}  {row[-1].rjust(widths[-1])}")
        lines.insert(len(meshes) + 1, "  ".join("-" * width for width in widths))
        lines += [self._totals(), *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines)

    __repr__ = __str__

    def _totals(self) -> str:
        parameters = [row for row in self.rows if row.is_parameter]
        elements = sum(math.prod(row.shape) for row in parameters)
        held = self.bytes_by_device
        most = f"; at most {max(held.values()):,} on one of {len(held)} devices" if held else ""
        return (
            f"{len(parameters)} parameters of {elements:,} elements, {len(self.rows) - len(parameters)} buffers: "
            f"{sum(row.nbytes for row in self.rows):,} bytes{most}"
        )


@hints.takes
def summary(module: torch.nn.Module) -> Summary:
    """A table of a module's parameters and buffers: global shape, dtype, placements, and the bytes of the largest part on a device.

    Nothing is fetched, and nothing waits.

    Raises:
        TypeError: not a module.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> print(summary(dtorch.nn.ColumnParallelLinear(4, 6, device_mesh=mesh)))
        DeviceMesh('cpu', [0, 1], mesh_dim_names=('tp',))
        parameter  shape   dtype    placements      bytes per device
        ---------  ------  -------  --------------  ----------------
        weight     (6, 4)  float32  [Shard(dim=0)]                48
        bias       (6,)    float32  [Shard(dim=0)]                12
        2 parameters of 30 elements, 0 buffers: 120 bytes; at most 60 on one of 2 devices
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"summary(): argument 'module' must be a torch.nn.Module, not {type(module).__name__}")
    return Summary([_row(one) for one in held_by(module)], list(NOTES.get(module, ())))


def _row(one: Held) -> Row:
    tensor = one.tensor
    shape = tuple(tensor.shape)
    mesh = placements = None
    held = {tensor.device: tensor.numel() * tensor.dtype.itemsize}
    if isinstance(tensor, Tensor) and tensor._spec is not None:
        mesh, placements = tensor.device_mesh, tensor.placements
        coordinates = itertools.product(*map(range, mesh.shape))
        held = {
            torch.device(mesh.device_type, device): math.prod(local_shape(placements, mesh.shape, coordinate, shape))
            * tensor.dtype.itemsize
            for device, coordinate in zip(mesh.device_ids, coordinates, strict=True)
        }
    return Row(" = ".join(one.names), one.is_parameter, shape, tensor.dtype, mesh, placements, held)


def _cells(row: Row, meshes: list[DeviceMesh]) -> tuple[str, ...]:
    placed = "plain" if row.placements is None else str(row.placements)
    if row.mesh is not None and len(meshes) > 1:
        placed += f" on mesh {meshes.index(row.mesh)}"
    return row.name, str(row.shape), str(row.dtype).removeprefix("torch."), placed, f"{row.bytes_per_device:,}"
