"""DeviceMesh: an n-d grid of devices with named axes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch

from . import hints

DEVICE_TYPES = ("cpu", "cuda")

#: Device ids are small counts; a larger one is a mistake, and would not fit torch's own device index.
LARGEST_ID = 32767

#: What the mesh of a process of an SPMD program has → what to use where one program runs all.
SPMD = {
    "get_group": "ops and redistribute() communicate by themselves",
    "get_all_groups": "ops and redistribute() communicate by themselves",
    "get_rank": "x.local_shards() says what each device holds",
    "get_local_rank": "mesh.coordinate(device_id) is where a device stands",
    "get_coordinate": "mesh.coordinate(device_id) is where a device stands",
}


class DeviceMesh:
    """An n-d grid of devices. A grid dimension is an *axis*; its name is one of ``mesh_dim_names``.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``; with an index (``"cuda:1"``) and no ``mesh``, that one device.
        mesh: nested list or integer tensor of device ids, in row-major order of the axes.
        mesh_dim_names: one distinct name per axis.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a ragged, empty or non-integer ``mesh``, repeated or negative ids, a wrong number of names.

    Example::

        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh.size("tp")
        2
    """

    __slots__ = ("device_type", "shape", "mesh_dim_names", "device_ids", "_coordinates", "_hash", "__weakref__")

    #: ``"cpu"`` or ``"cuda"``.
    device_type: str
    #: The number of devices along each axis.
    shape: tuple[int, ...]
    #: The name of each axis, or None.
    mesh_dim_names: tuple[str, ...] | None
    #: The device ids in row-major order.
    device_ids: tuple[int, ...]
    _coordinates: dict[int, tuple[int, ...]]
    _hash: int

    @hints.takes
    def __init__(
        self,
        device_type: str,
        mesh: Sequence | torch.Tensor | int | None = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> None:
        if isinstance(device_type, torch.device):
            device_type = str(device_type)
        if not isinstance(device_type, str):
            raise TypeError(f"DeviceMesh(): argument 'device_type' must be str, not {type(device_type).__name__}")
        kind, colon, index = device_type.partition(":")
        if kind not in DEVICE_TYPES:
            raise ValueError(
                f"DeviceMesh(): device_type must be one of {', '.join(map(repr, DEVICE_TYPES))}, got {device_type!r}"
            )
        if colon:
            if not index.isdigit():
                raise ValueError(f"DeviceMesh(): invalid device string {device_type!r}")
            if mesh is not None:
                raise ValueError(
                    f"DeviceMesh(): device_type {device_type!r} names one device; leave its index out when giving mesh"
                )
            mesh = [int(index)]
        elif mesh is None:
            mesh = [0]
        shape, ids = _grid(mesh)
        names = _names(mesh_dim_names, len(shape))
        put = object.__setattr__
        put(self, "device_type", kind)
        put(self, "shape", shape)
        put(self, "device_ids", ids)
        put(self, "mesh_dim_names", names)
        put(self, "_coordinates", dict(zip(ids, itertools.product(*map(range, shape)), strict=True)))
        put(self, "_hash", hash((kind, shape, ids, names)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a DeviceMesh does not change: cannot set {name!r}; make a new one")

    @property
    def mesh(self) -> torch.Tensor:
        """The device ids: an int64 tensor of the mesh's shape, a new one each time.

        Example::

            >>> DeviceMesh("cpu", [[0, 1], [2, 3]]).mesh.T.tolist()
            [[0, 2], [1, 3]]
        """
        return torch.tensor(self.device_ids, dtype=torch.int64, device="cpu").reshape(self.shape)

    @property
    def dim_names(self) -> tuple[str, ...] | None:
        """The same as ``mesh_dim_names``."""
        return self.mesh_dim_names

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def is_distributed(self) -> bool:
        """Whether the mesh has more than one device."""
        return len(self.device_ids) > 1

    def size(self, axis: int | str | None = None) -> int:
        """The number of devices along ``axis`` (an index or a name), or in the whole mesh.

        Raises:
            TypeError, ValueError: no such axis.

        Example::

            >>> DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]]).size(1)
            3
        """
        return len(self.device_ids) if axis is None else self.shape[self._axis(axis)]

    def has_dim_name(self, name: str) -> bool:
        """Whether one of the axes is called ``name``."""
        return self.mesh_dim_names is not None and name in self.mesh_dim_names

    def dim_name_index(self, name: str, default: int | None = None) -> int | None:
        """The index of the axis called ``name``, or ``default`` if there is none."""
        return self.mesh_dim_names.index(name) if self.has_dim_name(name) else default  # type: ignore[union-attr]

    def check_all_dim_names_in_set(self, names: Collection[str]) -> None:
        """Raise ValueError unless every axis name is one of ``names``.

        Example::

            >>> DeviceMesh("cpu", [0, 1], ("tp",)).check_all_dim_names_in_set({"dp", "tp"})
        """
        if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(n, str) for n in names):
            raise TypeError(f"check_all_dim_names_in_set(): argument 'names' must be a set of str, got {names!r}")
        unknown = [name for name in self.mesh_dim_names or () if name not in set(names)]
        if unknown:
            raise ValueError(f"mesh axis names {unknown} are not among the known ones {sorted(names)}")

    def unbind(self, axes: str | int | Sequence[str | int]) -> list[DeviceMesh]:
        """The sub-meshes at each index along ``axes``, in row-major order; ``[self]`` for names the mesh lacks.

        A mesh whose every axis is unbound gives meshes of one device with one unnamed axis.

        Raises:
            TypeError, ValueError: an axis that is neither an index nor a name, out of range, or named twice.

        Example::

            >>> DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp")).unbind("dp")[1]
            DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',))
        """
        wanted: list[Any] = list(axes) if isinstance(axes, (list, tuple)) else [axes]
        present = [self._axis(a) for a in wanted if not isinstance(a, str) or self.has_dim_name(a)]
        if len(set(present)) != len(present):
            raise ValueError(f"unbind(): an axis appears twice in {axes!r}")
        if not present:
            return [self]
        grid = self.mesh
        kept = [a for a in range(self.ndim) if a not in present]
        names = None if self.mesh_dim_names is None or not kept else [self.mesh_dim_names[a] for a in kept]
        moved = grid.permute(*present, *kept).reshape(
            math.prod(self.shape[a] for a in present), *[self.shape[a] for a in kept]
        )
        return [DeviceMesh(self.device_type, part if kept else part.reshape(1), names) for part in moved]

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        """The mesh itself, for the names of all its axes in order.

        In a process of an SPMD program ``mesh["tp"]`` is the sub-mesh that the process is in. One controller is in none of them.

        Raises:
            KeyError: names of some axes, or of none: what to write instead.
        """
        wanted = (names,) if isinstance(names, str) else names
        if not isinstance(wanted, tuple) or not all(isinstance(name, str) for name in wanted):
            raise TypeError(f"DeviceMesh[...]: expected axis names, got {names!r}")
        if wanted == self.mesh_dim_names:
            return self
        for name in wanted:
            if not self.has_dim_name(name):
                raise KeyError(f"DeviceMesh[...]: {self} has no axis named {name!r}")
        others = [name for name in self.mesh_dim_names or () if name not in wanted]
        if not others:
            raise KeyError(f"DeviceMesh[...]: {names!r} are the axes of {self} in another order, or more than once")
        raise KeyError(
            f"DeviceMesh[{names!r}]: this program is in none of the sub-meshes of {self}: mesh.unbind({others}) lists them all"
        )

    __iter__ = None

    def __getattr__(self, name: str) -> Any:
        advice = SPMD.get(name)
        if advice is None:
            raise AttributeError(f"'DeviceMesh' object has no attribute {name!r}")
        raise AttributeError(f"a DeviceMesh has no {name!r}: one program runs all devices and has no rank; {advice}")

    def coordinate(self, device_id: int) -> tuple[int, ...] | None:
        """The position of a device in the grid, or None if the mesh does not hold it."""
        return self._coordinates.get(device_id)

    def _axis(self, axis: int | str) -> int:
        if isinstance(axis, str):
            index = self.dim_name_index(axis)
            if index is None:
                raise ValueError(f"mesh has no axis named {axis!r}; its axes are {list(self.mesh_dim_names or ())}")
            return index
        if isinstance(axis, bool) or not isinstance(axis, int):
            raise TypeError(f"mesh axis must be an int or a name, got {axis!r}")
        if not -self.ndim <= axis < self.ndim:
            raise ValueError(f"mesh axis {axis} is out of range for a mesh of {self.ndim} axes")
        return axis % self.ndim

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, DeviceMesh)
            and self._hash == other._hash
            and self.device_ids == other.device_ids
            and self.shape == other.shape
            and self.device_type == other.device_type
            and self.mesh_dim_names == other.mesh_dim_names
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        grid = self.mesh.tolist() if len(self.device_ids) <= 64 else f"{self.size()} devices, shape={self.shape}"
        names = "" if self.mesh_dim_names is None else f", mesh_dim_names={self.mesh_dim_names}"
        return f"DeviceMesh({self.device_type!r}, {grid}{names})"

    def __reduce__(self) -> tuple:
        return DeviceMesh, (self.device_type, self.mesh.tolist(), self.mesh_dim_names)


@hints.takes
def init_device_mesh(
    device_type: str, mesh_shape: Sequence[int] | int, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """A mesh of the devices 0, 1, … in row-major order.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        mesh_shape: the size of every axis, or one int for a mesh of one axis.
        mesh_dim_names: one distinct name per axis.

    Raises:
        TypeError, ValueError: an argument of the wrong type, an axis without devices, a wrong number of names.

    Example::

        >>> init_device_mesh("cpu", (2, 2), ("dp", "tp"))
        DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
    """
    shape = (mesh_shape,) if isinstance(mesh_shape, int) and not isinstance(mesh_shape, bool) else mesh_shape
    if not isinstance(shape, (list, tuple, torch.Size)) or not all(type(n) is int for n in shape):
        raise TypeError(
            f"init_device_mesh(): argument 'mesh_shape' must be an int or a tuple of ints, got {mesh_shape!r}"
        )
    if not shape or any(n < 1 for n in shape):
        raise ValueError(f"init_device_mesh(): every axis needs at least one device, got {tuple(shape)}")
    return DeviceMesh(device_type, torch.arange(math.prod(shape), device="cpu").reshape(tuple(shape)), mesh_dim_names)


def _grid(mesh: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the row-major device ids of what the user gave as ``mesh``."""
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        mesh = [mesh]
    if isinstance(mesh, torch.Tensor):
        if mesh.is_floating_point() or mesh.is_complex() or mesh.dtype == torch.bool:
            raise TypeError(f"DeviceMesh(): argument 'mesh' must hold integers, got a tensor of {mesh.dtype}")
        mesh = mesh.reshape(1).tolist() if mesh.ndim == 0 else mesh.tolist()
    elif hasattr(mesh, "tolist"):
        mesh = mesh.tolist()
    if not isinstance(mesh, (list, tuple, range)):
        raise TypeError(
            f"DeviceMesh(): argument 'mesh' must be a nested list or an integer tensor of device ids, got {mesh!r}"
        )
    shape: list[int] = []
    level: list[Any] = [mesh]
    while True:
        lengths = {len(row) for row in level}
        if len(lengths) != 1:
            raise ValueError(f"DeviceMesh(): argument 'mesh' is ragged: {mesh!r}")
        shape.append(lengths.pop())
        if shape[-1] == 0:
            raise ValueError("DeviceMesh(): argument 'mesh' holds no devices")
        flat = [item for row in level for item in row]
        nested = [isinstance(item, (list, tuple, range)) for item in flat]
        if not any(nested):
            break
        if not all(nested):
            raise ValueError(f"DeviceMesh(): argument 'mesh' is ragged: {mesh!r}")
        level = flat
    flat = [item if isinstance(item, bool) or not hasattr(item, "__index__") else operator.index(item) for item in flat]
    if not all(type(item) is int for item in flat):
        raise TypeError(f"DeviceMesh(): argument 'mesh' must hold integer device ids, got {mesh!r}")
    if any(item < 0 for item in flat):
        raise ValueError(f"DeviceMesh(): device ids must not be negative, got {mesh!r}")
    if max(flat) > LARGEST_ID:
        raise ValueError(f"DeviceMesh(): device ids must be at most {LARGEST_ID}, got {mesh!r}")
    if len(set(flat)) != len(flat):
        repeated = sorted({item for item in flat if flat.count(item) > 1})
        raise ValueError(f"DeviceMesh(): device ids must be distinct, {repeated} appear more than once")
    return tuple(shape), tuple(flat)


def _names(names: Sequence[str] | None, ndim: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names):
        raise TypeError(f"DeviceMesh(): argument 'mesh_dim_names' must be a tuple of str, got {names!r}")
    if len(names) != ndim:
        raise ValueError(
            f"DeviceMesh(): mesh_dim_names must name each of the {ndim} axes, got {len(names)}: {tuple(names)}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"DeviceMesh(): mesh_dim_names must be distinct, got {tuple(names)}")
    return tuple(names)
