"""Tensors out of nothing, out of data, and out of plain tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from .client import host, random_ops, runtime, torch_internals
from .mesh import DeviceMesh
from .placement import REPLICATE, Placement, PlacementList, is_partial, normalize
from .sharding.spec import Spec, intern_mesh
from .tensor import Tensor

aten = torch.ops.aten


Where = tuple[DeviceMesh, PlacementList]


def _where(name: str, ndim: int, device: Any, device_mesh: Any, placements: Any) -> Where | None:
    """The mesh and normalised placements a call asks for; None: uncommitted."""
    if device is not None and device_mesh is not None:
        raise ValueError(f"{name}(): device= and device_mesh= cannot be given together; a mesh names its devices")
    if device is not None and placements is not None:
        raise ValueError(
            f"{name}(): device= and placements= cannot be given together; give device_mesh= and placements="
        )
    if device is not None:
        kind, index = device_named(name, device)
        if kind == "cuda":
            return DeviceMesh(f"cuda:{index or 0}"), PlacementList((REPLICATE,))
    if device_mesh is None:
        if placements is None:
            chosen = runtime.chosen_mesh()
            return None if chosen is None else (chosen, PlacementList((REPLICATE,) * chosen.ndim))
        device_mesh = runtime.get_default_mesh()
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"{name}(): argument 'device_mesh' must be a DeviceMesh, not {type(device_mesh).__name__}")
    if placements is None:
        return device_mesh, PlacementList((REPLICATE,) * device_mesh.ndim)
    return device_mesh, normalize(placements, device_mesh.ndim, ndim)


def device_named(name: str, device: Any) -> tuple[str, int | None]:
    """The type and index of ``device``, which must be one that a dtorch tensor can be on: cpu, cuda or dtorch itself."""
    if isinstance(device, int) and not isinstance(device, bool):  # to torch a bare number is an accelerator's
        return "cuda", device
    found = torch.device(device)
    if found.type not in ("cpu", "cuda", torch_internals.BACKEND):
        raise ValueError(f"{name}(): device must be a cpu, cuda or dtorch device, got {str(device)!r}")
    return found.type, found.index


def _place(plain: torch.Tensor, where: Where | None, requires_grad: bool) -> Tensor:
    host.check_dense(plain)
    tensor = host.make(plain) if where is None else host.from_plain(plain, *where)
    return tensor.requires_grad_(True) if requires_grad else tensor


def from_torch(
    data: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """A dtorch tensor with the values of a plain one, copied; ``requires_grad`` is kept.

    Args:
        data: a dense plain tensor.
        device_mesh: where to; uncommitted without mesh and placements.
        placements: one per mesh axis; replicated if only a mesh is given. Under ``Partial()`` the first device holds the values.

    Raises:
        TypeError, ValueError: not a tensor; sparse, nested, quantised or on the meta device; placements that do not fit.

    Example::

        >>> from_torch(torch.arange(4), DeviceMesh("cpu", [0, 1]), [Shard(0)]).local_shards()[torch.device("cpu", 1)]
        tensor([2, 3])
    """
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"from_torch(): argument 'data' must be a torch.Tensor, not {type(data).__name__}")
    if isinstance(data, Tensor):
        return data if device_mesh is None and placements is None else data.redistribute(device_mesh, placements)
    host.check_dense(data)
    where = _where("from_torch", data.ndim, None, device_mesh, placements)
    if where is None:
        return _place(data.detach().clone(), None, data.requires_grad)
    return _place(data, where, data.requires_grad)


def distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """`from_torch` under the name that ``torch.distributed.tensor`` uses; on the default mesh if none is given.

    Args:
        tensor: a dense plain tensor, or a dtorch tensor, which is redistributed.
        device_mesh: where to; the default mesh if left out.
        placements: one per mesh axis; replicated if left out.

    Raises:
        TypeError, ValueError: as `from_torch`.

    Example::

        >>> distribute_tensor(torch.ones(4, 2), DeviceMesh("cpu", [0, 1]), [Shard(1)]).placements
        [Shard(dim=1)]
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor(): argument 'tensor' must be a torch.Tensor, not {type(tensor).__name__}")
    mesh = runtime.get_default_mesh() if device_mesh is None else device_mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"distribute_tensor(): argument 'device_mesh' must be a DeviceMesh, not {type(mesh).__name__}")
    return from_torch(tensor, mesh, placements)


def from_numpy(
    array: Any, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """A dtorch tensor with the values and dtype of a numpy array, copied (``torch.from_numpy`` shares its memory).

    Args:
        array: of any numeric dtype that torch has.
        device_mesh, placements: where to, as for `from_torch`.

    Raises:
        TypeError: not an array, or of a dtype that torch lacks.

    Example::

        >>> import numpy
        >>> from_numpy(numpy.zeros((4, 2)), DeviceMesh("cpu", [0, 1]), [Shard(0)]).dtype
        torch.float64
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody will write: it is copied
        plain = torch.from_numpy(array)
    return from_torch(plain, device_mesh, placements)


def tensor(
    data: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """``torch.tensor``, placed: a copy of ``data``, of its dtype unless told otherwise.

    Args:
        data: numbers, nested lists of them (0-d tensors too), an array or a tensor.
        device_mesh, placements: where to; uncommitted with neither. A dtorch tensor's copy stays where that is.

    Raises:
        TypeError, ValueError, RuntimeError: torch's own for ``data``; placements that do not fit.

    Example::

        >>> tensor([[1, 2], [3, 4]], device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)]).sum().item()
        10
    """
    if isinstance(data, Tensor):
        where = _told("tensor", data.ndim, device, device_mesh, placements, data)
        found = data.detach().clone()
        if dtype is not None:
            found = found.to(dtype)
        return _moved(found, where).requires_grad_(requires_grad)
    if isinstance(data, torch.Tensor):
        host.check_dense(data)
        plain = data.detach().clone()
    else:
        plain = torch.tensor(data, dtype=dtype, device="cpu")
    if dtype is not None:
        plain = plain.to(dtype)
    return _place(plain, _where("tensor", plain.ndim, device, device_mesh, placements), requires_grad)


def as_tensor(
    data: Any,
    dtype: torch.dtype | None = None,
    device: Any = None,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> Tensor:
    """``torch.as_tensor``, placed: a dtorch tensor that is of that dtype and there already is returned itself, all else is copied.

    Example::

        >>> x = as_tensor([1.0, 2.0])
        >>> as_tensor(x) is x
        True
    """
    if isinstance(data, Tensor):
        found = _moved(data, _told("as_tensor", data.ndim, device, device_mesh, placements, data))
        return found if dtype is None else found.to(dtype)
    return tensor(data, dtype=dtype, device=device, device_mesh=device_mesh, placements=placements)


def _told(name: str, ndim: int, device: Any, device_mesh: Any, placements: Any, source: Tensor) -> Where | None:
    """Where a call puts something made of ``source``; None: where that is."""
    if device is None and device_mesh is None:
        return (
            None if placements is None else (source.device_mesh, normalize(placements, source.device_mesh.ndim, ndim))
        )
    where = _where(name, ndim, device, device_mesh, placements)
    return None if device is not None and (where is None or where[0].device_type == "cpu") else where


def _moved(x: Tensor, where: Where | None) -> Tensor:
    return x if where is None else x.redistribute(*where)


FACTORY_DOC = """``torch.{name}``, made where it is to live.

    Args:
        device_mesh: the mesh; the default mesh if only ``placements`` are given.
        placements: one per mesh axis; replicated if only a mesh is given. With neither, the tensor joins the mesh of the first tensor it
            meets in an op.
        device: ``"cuda:1"`` is a mesh of that one device; ``x.device`` and ``"cpu"`` mean no mesh.

    All else, ``dtype`` and what it is if left out included, is as for torch; there is no ``out=``.

    Raises:
        TypeError, ValueError, RuntimeError: torch's own for its arguments; a mesh or placements that do not fit; ``device`` and
            ``device_mesh`` both.
        DeviceUnavailable: a device that does not exist here.

    Example::

        >>> {name}({example}, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Replicate()]).device_mesh
        DeviceMesh('cpu', [0, 1])
    """

#: Arguments for the example of each factory.
EXAMPLES = {
    "zeros": "2, 3", "ones": "2, 3", "full": "(2, 3), 1.5", "empty": "2, 3", "arange": "1, 6, 2", "linspace": "0, 1, 5",
    "logspace": "0, 2, 3", "eye": "3", "rand": "2, 3", "randn": "2, 3", "randint": "0, 10, (2, 3)", "randperm": "5",
    "tril_indices": "3, 3", "triu_indices": "3, 3", "hann_window": "5", "hamming_window": "5", "blackman_window": "5",
    "bartlett_window": "5", "kaiser_window": "5", "empty_strided": "(2, 3), (1, 2)", "empty_permuted": "(2, 3), (1, 0)",
    "scalar_tensor": "1.5",
}  # fmt: skip


def _factory(name: str) -> Any:
    """The dtorch form of ``torch.<name>``: the same arguments, and ``device_mesh=`` and ``placements=``."""
    make = getattr(torch, name)
    fill = RANDOM_FILLS.get(name)

    def factory(
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        device: Any = None,
        requires_grad: bool = False,
        out: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        if out is not None:
            raise TypeError(f"{name}(): out= is not supported; write x.copy_(dtorch.{name}(...)) instead")
        if not isinstance(requires_grad, bool):
            raise TypeError(f"{name}(): argument 'requires_grad' must be bool, not {type(requires_grad).__name__}")
        if kwargs.get("layout", torch.strided) not in (None, torch.strided):
            raise ValueError(f"{name}(): dtorch supports dense tensors only, got layout={kwargs['layout']}")
        kwargs.pop("pin_memory", None)
        _check_generator(name, kwargs.get("generator"))
        # torch itself checks the arguments and says shape and dtype; no memory is touched on the meta device.
        checked = {k: v for k, v in kwargs.items() if k != "generator"}
        shaped = make(*args, device="meta", **checked)
        where = _where(name, shaped.ndim, device, device_mesh, placements)
        if where is not None and not _from_client(name, kwargs):
            mesh, placed = where
            settled = PlacementList(REPLICATE if is_partial(p) else p for p in placed)
            spec = Spec.of(intern_mesh(mesh), settled, shaped.shape, None, shaped.dtype)
            made = FILLS[name](spec, args, kwargs) if fill is None else fill(spec, args, kwargs)
            if settled != placed:
                with torch.no_grad():
                    made = made.redistribute(mesh, placed)
            return made.requires_grad_(True) if requires_grad else made
        return _place(make(*args, device="cpu", **kwargs), where, requires_grad)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = FACTORY_DOC.format(name=name, example=EXAMPLES[name])
    return factory


def _check_generator(name: str, generator: Any) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}(): argument 'generator' must be torch.Generator, not {type(generator).__name__}")
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(f"{name}(): expected a CPU generator, got one of {generator.device}")


def _from_client(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the values are made here and sent: whatever is no fill, and random values that must be torch's own."""
    if name in RANDOM_FILLS:
        return kwargs.get("generator") is not None or runtime.controller().config.random == "torch"
    return name not in FILLS


def _uniform(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    if not spec.dtype.is_floating_point:
        torch.rand(1, dtype=spec.dtype, device="cpu", generator=torch.Generator())  # torch's own word on other dtypes
    return random_ops.generate(aten.uniform_.default, [], spec)


def _normal(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    return random_ops.generate(aten.normal_.default, [], spec)


def _integers(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    bounds = [a for a in args if isinstance(a, int)]
    low, high = kwargs.get("low", 0), kwargs.get("high")
    if len(bounds) == 2:
        low, high = bounds
    elif len(bounds) == 1:
        low, high = (bounds[0], high) if high is not None else (low, bounds[0])
    if spec.dtype != torch.int64:  # do the bounds fit?
        torch.randint(low, high, (1,), dtype=spec.dtype, device="cpu", generator=torch.Generator())
    return random_ops.generate(getattr(aten.random_, "from"), [low, high], spec)


def _filled(value: Any) -> Any:
    def make(spec: Spec, args: Any, kwargs: Any) -> Tensor:
        return random_ops.filled(spec, value)

    return make


def _full(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
    value = value.item() if isinstance(value, torch.Tensor) else value
    torch.full((1,), value, dtype=spec.dtype, device="cpu")  # does it fit?
    return random_ops.filled(spec, value)


RANDOM_FILLS: dict[str, Any] = {"rand": _uniform, "randn": _normal, "randint": _integers}
FILLS: dict[str, Any] = {"zeros": _filled(0), "ones": _filled(1), "empty": _filled(0), "full": _full}

zeros = _factory("zeros")
ones = _factory("ones")
full = _factory("full")
empty = _factory("empty")
arange = _factory("arange")
linspace = _factory("linspace")
logspace = _factory("logspace")
eye = _factory("eye")
rand = _factory("rand")
randn = _factory("randn")
randint = _factory("randint")
randperm = _factory("randperm")
tril_indices = _factory("tril_indices")
triu_indices = _factory("triu_indices")
hann_window = _factory("hann_window")
hamming_window = _factory("hamming_window")
blackman_window = _factory("blackman_window")
bartlett_window = _factory("bartlett_window")
kaiser_window = _factory("kaiser_window")
empty_strided = _factory("empty_strided")
empty_permuted = _factory("empty_permuted")
scalar_tensor = _factory("scalar_tensor")


LIKE_DOC = """``torch.{name}``: on the mesh and with the placements of ``input``, unless told otherwise.

    Args:
        input: a dtorch tensor, or a plain one, which has no mesh to follow.
        device_mesh, placements: where to, as for the other factories.

    Raises:
        TypeError, ValueError: no tensor; a mesh or placements that do not fit.

    Example::

        >>> x = ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
        >>> {name}({example}).placements
        [Shard(dim=0)]
    """


def _like(name: str) -> Any:
    """``torch.<name>_like`` that can also be told where to; without that it follows its source."""
    name += "_like"
    make = getattr(torch, name)

    def like(
        input: torch.Tensor,
        *args: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        device: Any = None,
        requires_grad: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"{name}(): argument 'input' (position 1) must be Tensor, not {type(input).__name__}")
        if isinstance(input, Tensor):
            where = _told(name, input.ndim, device, device_mesh, placements, input)
            made = _moved(make(input.detach(), *args, **kwargs), where)
        else:
            host.check_dense(input)
            where = _where(name, input.ndim, device, device_mesh, placements)
            made = _place(make(input.detach(), *args, **kwargs, device="cpu"), where, False)
        return made.requires_grad_(True) if requires_grad else made

    like.__name__ = like.__qualname__ = name
    like.__doc__ = LIKE_DOC.format(
        name=name, example={"full_like": "x, 1.5", "randint_like": "x, 0, 10"}.get(name, "x")
    )
    return like


zeros_like = _like("zeros")
ones_like = _like("ones")
empty_like = _like("empty")
full_like = _like("full")
rand_like = _like("rand")
randn_like = _like("randn")
randint_like = _like("randint")


def new(source: Tensor, name: str, args: Any, kwargs: dict[str, Any], device_mesh: Any, placements: Any) -> Tensor:
    """``source.new_<name>(*args, device_mesh=…, placements=…)``: of the source's dtype, and on its mesh, unless told otherwise."""
    if kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": source.dtype}
    if device_mesh is None and kwargs.get("device") is None and source._spec is not None:
        device_mesh = source._spec.mesh
    make = tensor if name == "tensor" else globals()[name]
    return make(*args, **kwargs, device_mesh=device_mesh, placements=placements)
