"""Tensors out of nothing: torch's factories, made where they are to live."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch

from . import hints
from .client import fresh, host, random_ops, runtime
from .mesh import DeviceMesh
from .placement import Placement, boxed, settled
from .placing import moved, place, tensor, where_to, where_told
from .sharding.spec import Spec, intern_mesh
from .tensor import Tensor

aten = torch.ops.aten

FACTORY_DOC = """``torch.{name}``, made where it is to live.

    Args:
        device_mesh: the mesh; the default mesh if only ``placements`` are given, which is one CPU device unless
            ``dtorch.default_mesh(mesh)`` says otherwise.
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


#: The keywords of torch's factories, beyond our own.
KEYWORDS = frozenset({
    "size", "dtype", "layout", "device", "requires_grad", "pin_memory", "memory_format", "generator", "out", "names", "fill_value",
    "start", "end", "step", "steps", "base", "n", "m", "low", "high", "row", "col", "offset", "window_length", "periodic", "alpha",
    "beta", "stride", "physical_layout", "input", "s",
})  # fmt: skip


def _check_keywords(name: str, given: dict[str, Any]) -> None:
    """torch's own message on a misspelt keyword lists what it got, not which is wrong."""
    for keyword in given:
        if keyword not in KEYWORDS:
            hint = hints.near(keyword, ["device_mesh", "placements", *sorted(KEYWORDS)])
            raise TypeError(f"{name}(): got an unexpected keyword argument {keyword!r}{hint}")


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
        _check_keywords(name, kwargs)
        if out is not None:
            raise TypeError(f"{name}(): out= is not supported; write x.copy_(dtorch.{name}(...)) instead")
        if not isinstance(requires_grad, bool):
            raise TypeError(f"{name}(): argument 'requires_grad' must be bool, not {type(requires_grad).__name__}")
        if kwargs.get("layout", torch.strided) not in (None, torch.strided):
            raise ValueError(f"{name}(): dtorch supports dense tensors only, got layout={kwargs['layout']}")
        kwargs.pop("pin_memory", None)
        _check_generator(name, kwargs.get("generator"))
        if _from_client(name, kwargs):
            values = make(*args, device="cpu", **kwargs)
            return place(values, where_to(name, values.ndim, device, device_mesh, placements), requires_grad)
        # torch itself checks the arguments and says shape and dtype; no memory is touched on the meta device.
        checked = {k: v for k, v in kwargs.items() if k != "generator"}
        shaped = _shaped(name, args, checked)
        where = where_to(name, shaped.ndim, device, device_mesh, placements)
        if where is not None:
            mesh, placed = where
            whole = boxed(placed) if name in RANDOM_FILLS else settled(placed)
            spec = Spec.of(intern_mesh(mesh), whole, shaped.shape, None, shaped.dtype)
            made = FILLS[name](spec, args, kwargs) if fill is None else fill(spec, args, kwargs)
            if whole != placed:
                with torch.no_grad():
                    made = made.redistribute(mesh, placed)
            return made.requires_grad_(True) if requires_grad else made
        return place(make(*args, device="cpu", **kwargs), where, requires_grad)

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = FACTORY_DOC.format(name=name, example=EXAMPLES[name])
    return factory


def _shaped(name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """What ``torch.<name>`` would make, without its memory."""
    if name in (
        "randn",
        "randint",
    ):  # torch's meta kernels of these are Python that imports sympy, a second or more (2.13)
        try:
            return _shaped_random(name, args, kwargs)
        except (
            TypeError,
            RuntimeError,
            ValueError,
            IndexError,
        ):  # let torch say in the factory's own name what is wrong
            return getattr(torch, name)(*args, device="cpu", generator=torch.Generator(), **kwargs)
    return getattr(torch, name)(*args, device="meta", **kwargs)


def _shaped_random(name: str, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """By ``torch.rand``, which takes the arguments of ``randn``, and takes the size and dtype of ``randint``."""
    if name == "randn":
        return torch.rand(*args, device="meta", **kwargs)
    size = kwargs["size"] if "size" in kwargs else args[-1]
    if not isinstance(size, (list, tuple)):
        raise TypeError(size)
    empty = (args if "size" in kwargs else args[:-1], {**kwargs, "size": (0,)})
    typed = torch.randint(*empty[0], **empty[1], device="cpu", generator=torch.Generator())
    return torch.empty(size, dtype=typed.dtype, device="meta")


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
    if not spec.dtype.is_floating_point:
        torch.randn(1, dtype=spec.dtype, device="cpu", generator=torch.Generator())
    return random_ops.generate(aten.normal_.default, [], spec)


def _integers(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    bounds = [int(a) for a in args if isinstance(a, numbers.Integral)]
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
        return fresh.filled(spec, value)

    return make


def _full(spec: Spec, args: Any, kwargs: Any) -> Tensor:
    value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
    value = value.item() if isinstance(value, torch.Tensor) else value
    torch.full((1,), value, dtype=spec.dtype, device="cpu")  # does it fit?
    return fresh.filled(spec, value)


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
        _check_keywords(name, kwargs)
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"{name}(): argument 'input' (position 1) must be Tensor, not {type(input).__name__}")
        if isinstance(input, Tensor):
            where = where_told(name, input.ndim, device, device_mesh, placements, input)
            made = moved(make(input.detach(), *args, **kwargs), where)
        else:
            host.check_dense(input)
            where = where_to(name, input.ndim, device, device_mesh, placements)
            made = place(make(input.detach(), *args, **kwargs, device="cpu"), where, False)
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
