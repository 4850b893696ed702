"""Tensor: a ``torch.Tensor`` whose values live on the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import hints
from .client import torch_internals
from .future import TensorFuture
from .mesh import DeviceMesh
from .placement import REPLICATE, Placement, PlacementList, is_shard, normalize

PLACEMENT_MODES = ("raise_error", "replicate", "keep")


class Tensor(torch.Tensor):
    """A tensor on a `DeviceMesh`: what ``torch.Tensor`` does, for values that live on the workers.

    Args:
        data: nested lists of numbers or an array, which become the default dtype; a plain tensor, which keeps its own. Bare ints are
            the sizes of an empty tensor, as for ``torch.Tensor``.
        device_mesh: the mesh; the default mesh if only ``placements`` are given.
        placements: one placement per mesh axis; replicated if only a mesh is given. With neither, the tensor joins the mesh of the
            first tensor it meets in an op.

    Raises:
        TypeError, ValueError: data that is no tensor; placements that do not fit the mesh or the shape.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1])
        >>> x = Tensor([[1.0, 2.0], [3.0, 4.0]], device_mesh=mesh, placements=[Shard(0)])
        >>> (x @ x).sum().item()
        54.0
    """

    # No __slots__: a plain parameter becomes one of ours in place (``p.data = x``), for which the two must be laid out alike.
    #: What planning sees; None while uncommitted.
    _spec: Any
    #: The value on the workers; None while uncommitted.
    _value: Any
    #: The client memory of an uncommitted tensor, else None.
    _host: Any = None
    #: The gradient hook of a leaf, else None.
    _leaf: Any = None
    #: Set by torch on a parameter; here for those that are none, of which it is asked often.
    _is_param = False

    __torch_function__ = torch_internals.no_torch_function  # type: ignore[assignment]

    def __new__(  # noqa: PYI034 - it makes no subclasses
        cls,
        *data: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        **named: Any,
    ) -> Tensor:
        from . import creation

        if set(named) - {"data"} or (named and data):
            wrong = next(name for name in named if name != "data" or data)
            hint = hints.near(wrong, ("device_mesh", "placements", "dtype", "requires_grad", "data"))
            raise TypeError(f"Tensor(): got an unexpected keyword argument {wrong!r}{hint}")
        data = (named["data"],) if named else data
        where: dict[str, Any] = {"device_mesh": device_mesh, "placements": placements, "requires_grad": requires_grad}
        if not data or all(type(size) is int for size in data) or (len(data) == 1 and isinstance(data[0], torch.Size)):
            # As torch.Tensor(2, 3) and torch.Tensor(other.shape): sizes, not values.
            return creation.empty(*(data or (0,)), dtype=dtype, **where)
        if len(data) > 1:
            raise TypeError(
                f"Tensor(): expected 'data' or sizes, got {len(data)} arguments; name device_mesh= and placements="
            )
        if dtype is None and not isinstance(data[0], torch.Tensor):
            dtype = torch.get_default_dtype()
        return creation.tensor(data[0], dtype=dtype, **where)

    if TYPE_CHECKING:  # torch's own, which return what they are called on

        def detach(self) -> Tensor: ...
        def clone(self, *args: Any, **kwargs: Any) -> Tensor: ...
        def copy_(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    # -- where it is --------------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh the tensor lives on; for an uncommitted one the default mesh, which it would join if it were printed."""
        from .client import runtime

        return runtime.get_default_mesh() if self._spec is None else self._spec.mesh

    @property
    def placements(self) -> PlacementList:
        """One placement per mesh axis: a tuple that also equals the same list."""
        if self._spec is None:
            return PlacementList((REPLICATE,) * self.device_mesh.ndim)
        return self._spec.placements

    @property
    def is_dtensor(self) -> bool:
        """True: this is a distributed tensor."""
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """``device(type='dtorch')``: a factory given it makes a tensor that joins the mesh of what it meets."""
        return torch_internals.device()

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return self.device.type == "cpu"

    def get_device(self) -> int:
        return -1 if self.device.type == "cpu" else 0

    @hints.takes
    def check_placement(self, axis: int | str, placement: Placement) -> bool:
        """Whether the tensor has ``placement`` along a mesh axis, given by index or name.

        Raises:
            TypeError, ValueError: no such axis, or no placement that this tensor could have.

        Example::

            >>> x = ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1], ("tp",)), placements=[Shard(0)])
            >>> x.check_placement("tp", Shard(-2))
            True
        """
        if not isinstance(placement, Placement):
            raise TypeError(
                f"check_placement(): argument 'placement' must be Shard, Replicate or Partial, got {placement!r}"
            )
        index = self.device_mesh._axis(axis)
        return self.placements[index] == normalize([placement], 1, self.ndim)[0]

    @hints.takes
    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
    ) -> Tensor:
        """The tensor on another mesh or with other placements; differentiable.

        Args:
            device_mesh: the target mesh; this tensor's own if left out.
            placements: one per axis of the target mesh; if left out, this tensor's own where the two meshes have as many axes.

        Raises:
            TypeError, ValueError: arguments that do not fit together.
            DeviceUnavailable: a device that does not exist here.

        Example::

            >>> x = ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
            >>> x.redistribute(placements=[Shard(1)]).local_shards()[torch.device("cpu", 0)].shape
            torch.Size([4, 1])
        """
        from .client import redistribute

        mesh = self.device_mesh if device_mesh is None else device_mesh
        if not isinstance(mesh, DeviceMesh):
            placed = isinstance(mesh, (Placement, list, tuple))
            raise TypeError(
                f"redistribute(): argument 'device_mesh' must be a DeviceMesh, got {type(mesh).__name__}"
                + ("; name the placements: x.redistribute(placements=[...])" if placed else "")
            )
        if placements is None:
            if mesh.ndim != self.device_mesh.ndim:
                raise ValueError(
                    f"redistribute(): placements are needed to go from {self.device_mesh} to {mesh}, which has another number of axes"
                )
            placements = self.placements
        return redistribute.redistribute(self, mesh, placements)  # type: ignore[arg-type]

    @hints.takes
    def redistribute_like(self, other: Tensor) -> Tensor:
        """The tensor with the mesh and placements of ``other``, which must have as many dims as those shard.

        Example::

            >>> x = ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
            >>> ones(4, 2, device_mesh=DeviceMesh("cpu", [2, 3])).redistribute_like(x).placements
            [Shard(dim=0)]
        """
        if not isinstance(other, Tensor):
            raise TypeError(
                f"redistribute_like(): argument 'other' must be a dtorch.Tensor, not {type(other).__name__}"
            )
        return self.redistribute(other.device_mesh, other.placements)

    @hints.takes
    def redistribute_by_dict(
        self,
        device_mesh: DeviceMesh | None = None,
        placements_dict: Mapping[str, Placement] | None = None,
        *,
        default_placement_mode: str = "raise_error",
    ) -> Tensor:
        """Redistribute by axis name.

        Args:
            placements_dict: axis name → placement. Names that the mesh lacks are ignored; a Shard of a dim of size 1 becomes Replicate.
            default_placement_mode: for axes not named: ``"raise_error"``, ``"replicate"`` or ``"keep"``.

        Raises:
            TypeError, ValueError: a mesh without names, an axis without a placement, arguments of the wrong type.

        Example::

            >>> x = ones(4, 2, device_mesh=DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp")))
            >>> x.redistribute_by_dict(placements_dict={"tp": Shard(1)}, default_placement_mode="keep").placements
            [Replicate(), Shard(dim=1)]
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(
                f"redistribute_by_dict(): argument 'device_mesh' must be a DeviceMesh, not {type(mesh).__name__}"
                + ("; name the placements: placements_dict={...}" if isinstance(mesh, Mapping) else "")
            )
        if placements_dict is not None and not isinstance(placements_dict, Mapping):
            raise TypeError(
                f"redistribute_by_dict(): argument 'placements_dict' must be a dict of axis name to placement, got {placements_dict!r}"
            )
        if default_placement_mode not in PLACEMENT_MODES:
            raise ValueError(
                f"redistribute_by_dict(): default_placement_mode must be one of {PLACEMENT_MODES}, got {default_placement_mode!r}"
            )
        if mesh.mesh_dim_names is None:
            if not mesh.is_distributed:  # as ``unbind`` leaves of a mesh of one axis: there is nothing to name
                return self.redistribute(mesh, [REPLICATE] * mesh.ndim)
            raise ValueError(f"redistribute_by_dict(): {mesh} has no axis names")
        wanted = dict(placements_dict or {})
        placements: list[Placement] = []
        for axis, name in enumerate(mesh.mesh_dim_names):
            if name in wanted:
                placement = wanted[name]
                if isinstance(placement, Placement) and is_shard(placement):
                    dim = placement.dim  # type: ignore[attr-defined]
                    if -self.ndim <= dim < self.ndim and self.shape[dim] == 1:
                        placement = REPLICATE
                placements.append(placement)
            elif default_placement_mode == "replicate":
                placements.append(REPLICATE)
            elif default_placement_mode == "keep":
                own = self.device_mesh.dim_name_index(name, axis if mesh == self.device_mesh else None)
                placements.append(REPLICATE if own is None else self.placements[own])
            else:
                raise ValueError(
                    f"redistribute_by_dict(): no placement for axis {name!r}; name it, or give default_placement_mode='replicate' or 'keep'"
                )
        return self.redistribute(mesh, placements)

    # -- values -------------------------------------------------------------------------------------------------------

    def to_torch(self) -> torch.Tensor:
        """The whole tensor as a plain CPU ``torch.Tensor`` of its own memory, detached: no gradient comes back. Waits for it.

        As with ``torch.from_numpy``, that memory may not be able to grow (``resize_``).

        Raises:
            RemoteError: an op that the value depends on failed.
            WorkerLost: a worker died.
        """
        return self.to_torch_async().get()

    full_tensor = to_torch

    def to_torch_async(self) -> TensorFuture:
        """A future of what `to_torch` would return, as of this point in the program."""
        from .client import values_out

        return values_out.fetch(self)

    def local_shards(self) -> dict[torch.device, torch.Tensor]:
        """What each device holds, as plain tensors; waits."""
        from .client import values_out

        return values_out.local_shards(self)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a numpy array of its own memory; waits."""
        if self.requires_grad and torch.is_grad_enabled() and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.detach().to_torch().numpy(force=force)

    def tolist(self) -> Any:
        """The values as nested lists; waits."""
        return self.detach().to_torch().tolist()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def apply_(self, callable: Any) -> Tensor:  # type: ignore[override]
        """``callable`` of every element, one after the other, here: the values come and go back."""
        _refuse_graph("apply_", self)
        return self.copy_(self.detach().to_torch().apply_(callable))

    def map_(self, tensor: torch.Tensor, callable: Any) -> Tensor:  # type: ignore[override]
        """``callable`` of every element and that of ``tensor``, here: the values come and go back."""
        _refuse_graph("map_", self, tensor)
        return self.copy_(self.detach().to_torch().map_(_plain(tensor), callable))

    def map2_(self, x: torch.Tensor, y: torch.Tensor, callable: Any) -> Tensor:  # type: ignore[override]
        """``callable`` of every element and those of ``x`` and ``y``, here: the values come and go back."""
        _refuse_graph("map2_", self, x, y)
        return self.copy_(self.detach().to_torch().map2_(_plain(x), _plain(y), callable))

    # -- torch habits -------------------------------------------------------------------------------------------------

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The same values without autograd; assigning makes this a handle on another tensor's values."""
        from .client import rebinding

        return rebinding.data_of(self)

    @data.setter
    def data(self, source: Tensor) -> None:
        from .client import rebinding

        rebinding.rebind(self, source)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        super().requires_grad_(requires_grad)
        if requires_grad:
            from .client import leaves

            leaves.watch(self)
        return self

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return _requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        """``torch.Tensor.to``; another type of device keeps the mesh's shape and the placements.

        Raises:
            DeviceUnavailable: devices that do not exist here.

        Example::

            >>> ones(2, device_mesh=DeviceMesh("cpu", [0, 1])).to("cpu", torch.float64).device_mesh
            DeviceMesh('cpu', [0, 1])
        """
        if len(args) + len(kwargs) == 1 and (args[0] if args else kwargs.get("dtype")) is self.dtype:
            return self  # models cast "to be sure", several times a layer
        from .client import moves

        return moves.to(self, args, kwargs)

    def cuda(
        self, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
    ) -> Tensor:  # type: ignore[override]
        """The tensor on a mesh of cuda devices of the same shape; DeviceUnavailable where they do not exist."""
        return self.to("cuda" if device is None else device, non_blocking=non_blocking, memory_format=memory_format)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:  # type: ignore[override]
        """The tensor on a mesh of cpu devices: itself, if it is on one."""
        return self.to("cpu", memory_format=memory_format)

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Without ``dtype`` the name of the plain CPU tensor type; with it, the tensor cast."""
        return super().type() if dtype is None else super().type(dtype, non_blocking, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        from .client import display

        return display.text(self)

    def __format__(self, spec: str) -> str:
        if self.ndim == 0 and (
            spec or not isinstance(self, torch.nn.Parameter)
        ):  # as torch: a parameter says that it is one
            return self.detach().item().__format__(spec)
        return object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        from .client import values_out

        return values_out.deepcopy(self, memo)

    def __copy__(self) -> Tensor:
        from .client import values_out

        copied = self.detach().requires_grad_(self.requires_grad)
        copied.__dict__.update(values_out.attributes(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        from .client import values_out

        return values_out.reduce(self)


def _refuse_graph(name: str, *tensors: torch.Tensor) -> None:
    """As torch does: the change would not be in the graph."""
    if any(t.requires_grad for t in tensors):
        raise RuntimeError(f"Can't call {name}() on Variable that requires grad. Use var.detach().{name}() instead.")


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_torch() if isinstance(tensor, Tensor) else tensor


def _new(name: str) -> Any:
    def make(self: Tensor, *args: Any, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> Tensor:
        if device_mesh is None and placements is None and kwargs.get("device") is None and name != "tensor":
            return original(self, *args, **kwargs)
        from . import creation

        return creation.new(self, name, args, kwargs, device_mesh, placements)

    original = getattr(torch.Tensor, f"new_{name}")
    make.__name__ = make.__qualname__ = f"new_{name}"
    make.__doc__ = (
        f"``torch.Tensor.new_{name}``, with ``device_mesh=`` and ``placements=``; with neither it follows this tensor."
    )
    return make


for _name in ("zeros", "ones", "empty", "full", "tensor", "empty_strided"):
    setattr(Tensor, f"new_{_name}", _new(_name))

_requires_grad: Any = torch.Tensor.requires_grad
