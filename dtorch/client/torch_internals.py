"""The private torch APIs that the client relies on, for torch 2.13. `tests/client/test_torch_internals.py` fails when one changes.

Of what may not import the client, `dtorch.placement` has torch's C++ placements, `dtorch.sharding` op schemas, which kernels an op has
and fake tensors, and `dtorch.worker` torch's bindings of ops and its process groups.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._device import _device_constructors

from ..errors import DTorchError

BACKEND = "dtorch"

CPU = torch.device("cpu")

_PRIVATE_USE = torch._C._autograd.DeviceType.PrivateUse1

#: Handles without memory of their own, by `wrapper_arguments`, and with it.
make_wrapper = torch.Tensor._make_wrapper_subclass
make_subclass = torch.Tensor._make_subclass

#: For a subclass on which torch's functions act as on any tensor.
no_torch_function = torch._C._disabled_torch_function_impl

#: What `torch.set_printoptions` sets.
print_options = torch._tensor_str.PRINT_OPTS

#: Gives the functions that a default device is for.
factories = _device_constructors

_library: torch.library.Library | None = None


@functools.lru_cache(maxsize=1)
def _our_device() -> torch.device:
    return torch.device(BACKEND, 0)


def device() -> torch.device:
    """What ``x.device`` says; ``cpu`` if another backend owns PrivateUse1."""
    return CPU if _library is None else _our_device()


def is_our_device(found: Any) -> bool:
    return _library is not None and torch.device(found).type == BACKEND


#: Composites of ``empty`` and an op on it, which would reach dispatch. Others are rarer.
_FACTORIES = (
    torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step, torch.ops.aten.full.default,
    torch.ops.aten.ones.default, torch.ops.aten.zeros.default,
)  # fmt: skip


def register_device(
    make_host: Callable[[torch.Tensor], torch.Tensor],
    factory: Callable[[torch._ops.OpOverload], Callable[..., torch.Tensor]],
    seed: Callable[[int], None],
) -> None:
    """Make ``dtorch`` a device type whose factories return ``make_host(plain tensor)``, some by a kernel of their own:
    PrivateUse1, renamed.

    So ``torch.zeros(3, device=x.device)`` in library code makes a tensor of ours. torch writes into it with our dispatch excluded, so it
    must have real memory.
    """
    global _library
    if _library is not None:
        return
    current = torch._C._get_privateuse1_backend_name()
    if current not in ("privateuseone", BACKEND):
        warnings.warn(
            f"PyTorch's extra device type is taken by {current!r}, so dtorch tensors say device='cpu': a factory given "
            "device=x.device makes a plain tensor, which is copied to the mesh when it meets a dtorch tensor",
            stacklevel=3,
        )
        return
    _keep_accelerator(lambda: torch.utils.rename_privateuse1_backend(BACKEND))
    module: Any = types.ModuleType(f"torch.{BACKEND}")
    module.is_available = lambda: False  # as an accelerator, which plain code would then use: DataParallel for one
    module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = seed
    module.manual_seed = seed
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    torch._register_device_module(BACKEND, module)
    sys.modules.setdefault(f"torch.{BACKEND}", module)

    def empty(
        size: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        memory_format: Any = None,
    ) -> torch.Tensor:
        plain = torch.empty(size, dtype=dtype, device=CPU, memory_format=memory_format or torch.contiguous_format)
        return make_host(plain)

    def empty_strided(
        size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> torch.Tensor:
        return make_host(torch.empty_strided(size, stride, dtype=dtype, device=CPU))

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        return target.copy_(source)

    # Without a guard torch.compile fails for plain tensors too, once this device type exists.
    guard = types.new_class(
        "Guard", (torch._C._acc.DeviceGuard,), {}, lambda body: body.update(type_=lambda self: _PRIVATE_USE)
    )
    torch._C._acc.register_python_privateuseone_device_guard(guard())
    _autocast_as_cpu()
    _refuse_storages()
    _library = torch.library.Library("aten", "IMPL")
    _library.impl("empty.memory_format", empty, "PrivateUse1")
    _library.impl("empty_strided", empty_strided, "PrivateUse1")
    for op in _FACTORIES:
        _library.impl(op.name().removeprefix("aten::"), factory(op), "PrivateUse1")
    _library.impl("_copy_from", copy_from, "PrivateUse1")


#: ``torch._C._accelerator_<name>`` → the same of ``torch.cuda`` for a torch built with CUDA (2.13, by its signatures; not run on a GPU).
_OF_CUDA: dict[str, Callable[..., Any]] = {
    "emptyCache": torch.cuda.empty_cache,
    "exchangeDevice": torch.cuda._exchange_device,
    "getDeviceIndex": torch.cuda.current_device,
    "getDeviceStats": torch.cuda.memory_stats_as_nested_dict,
    "getMemoryInfo": torch.cuda.mem_get_info,
    "getStream": torch.cuda.current_stream,
    "isAllocatorInitialized": torch.cuda.is_initialized,
    "maybeExchangeDevice": torch.cuda._maybe_exchange_device,
    "resetAccumulatedStats": torch.cuda.reset_accumulated_memory_stats,
    "resetPeakStats": torch.cuda.reset_peak_memory_stats,
    "setDeviceIndex": torch.cuda.set_device,
    "setStream": torch.cuda.set_stream,
    "synchronizeDevice": torch.cuda.synchronize,
}  # fmt: skip


def _keep_accelerator(rename: Callable[[], None]) -> None:
    """Have torch's Python name the accelerator after ``rename`` that it named before.

    A renamed PrivateUse1 is the accelerator for C++, before any other. Code that never meets a tensor of ours would choose it:
    ``DataLoader(pin_memory=True)``, ``torch.accelerator.is_available()``, ``torch.get_device_module()``.
    """
    accelerator = torch._C._accelerator_getAccelerator()
    rename()
    torch._C._accelerator_getAccelerator = lambda: accelerator  # type: ignore[assignment]
    torch._C._get_accelerator = lambda check=None: accelerator or CPU  # type: ignore[assignment]

    def absent(*args: Any) -> Any:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # torch's words

    if accelerator is None:
        for name in dir(torch._C):
            if name.startswith("_accelerator_") and not name.endswith(("_getAccelerator", "AllocatorSettings")):
                setattr(torch._C, name, absent)
    elif accelerator.type == "cuda":
        for name, function in _OF_CUDA.items():
            setattr(torch._C, f"_accelerator_{name}", function)
    is_pinned, pin_memory = torch.Tensor.is_pinned, torch.Tensor.pin_memory

    def plain_is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        where = device or accelerator
        return where is not None and is_pinned(self, device=where)

    def plain_pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return pin_memory(self, device=device or accelerator or absent())

    torch.Tensor.is_pinned, torch.Tensor.pin_memory = plain_is_pinned, plain_pin_memory  # type: ignore[method-assign]


def refuse_dlpack(cls: type) -> None:
    """``torch.utils.dlpack.to_dlpack`` asks no subclass: it would hand out the null pointer of a handle."""

    def to_dlpack(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__() if isinstance(tensor, cls) else torch._C._to_dlpack(tensor)

    torch.to_dlpack = torch.utils.dlpack.to_dlpack = to_dlpack


def refuse_wrappers(cls: type, mesh: type) -> None:
    """Have ``DistributedDataParallel`` refuse parameters of ``cls``, and ``module.to`` a ``mesh``, with a word of what to do instead.

    ``nn.Module.to`` reads its arguments by ``torch._C._nn._parse_to``, ``torch.Tensor.to`` does not.
    """
    parallel = torch.nn.parallel.DistributedDataParallel
    prepare, parse = parallel.__init__, torch._C._nn._parse_to

    @functools.wraps(prepare)
    def checked(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, torch.nn.Module) and any(isinstance(p, cls) for p in module.parameters()):
            raise TypeError(
                "DistributedDataParallel(): the module has dtorch parameters, and needs no wrapper: replicate them over the mesh "
                "(dtorch.distribute_module(module, mesh)) and shard the batch (dtorch.from_torch(batch, mesh, [Shard(0)])); "
                "gradients are then summed over the mesh by themselves"
            )
        prepare(self, module, *args, **kwargs)

    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, mesh) for value in (*args, *kwargs.values())):
            raise TypeError(
                "to(): a DeviceMesh is no device; dtorch.distribute_module(module, mesh) puts a module on it"
            )
        return parse(*args, **kwargs)

    parallel.__init__ = checked  # type: ignore[method-assign]
    torch._C._nn._parse_to = parse_to  # type: ignore[assignment]


def set_data_by(cls: type, become: Callable[[torch.Tensor, Any], None]) -> None:
    """``plain.data = source`` with a ``source`` of ``cls`` calls ``become``; torch would make a plain tensor over no memory and read it.

    ``module.to(x.device)`` sets the data of plain parameters in this way.
    """
    getset = torch._C.TensorBase.data

    def assign(tensor: torch.Tensor, source: torch.Tensor) -> None:
        if isinstance(source, cls):
            become(tensor, source)
        else:
            set_data(tensor, source)

    torch.Tensor.data = property(getset.__get__, assign)  # type: ignore[assignment]


def read_lists_of(plain_data: Callable[[Any], Any]) -> None:
    """``torch.tensor([loss, other_loss])`` copies the memory of what is in the list: have it try again with ``plain_data`` of it.

    dynamo looks these functions up later; jit must be told, and the modes that serve factories know them by their first identity.
    """
    factories()

    def reading(function: Any) -> Any:
        @functools.wraps(function)
        def call(data: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return function(data, *args, **kwargs)
            except NotImplementedError as error:
                if "'PrivateUse3' backend" not in str(error):  # see HANDLE_KEYS
                    raise
            return function(plain_data(data), *args, **kwargs)

        return call

    for name in ("tensor", "as_tensor", "asarray"):
        function = reading(getattr(torch, name))
        setattr(torch, name, function)
        torch.jit._builtins._register_builtin(function, f"aten::{name}")


def expect_no_rules(cls: type) -> None:
    """Spare each dispatch the look-up of a rule of `torch.library.register_torch_dispatch` for ``cls``, until there is one.

    It is Python, and takes 6 % of ``x + y``. torch gets the function when it first dispatches anything; if it has, this changes nothing.
    """
    registry = torch._library.simple_registry
    find, holder = registry.find_torch_dispatch_rule, registry.GenericTorchDispatchRuleHolder
    register = holder.register
    without: type | None = cls

    def find_rule(op: Any, torch_dispatch_class: type) -> Callable[..., Any] | None:
        return None if torch_dispatch_class is without else find(op, torch_dispatch_class)

    def register_rule(self: Any, torch_dispatch_class: type, function: Callable[..., Any]) -> Any:
        nonlocal without
        if torch_dispatch_class is cls:
            without = None
        return register(self, torch_dispatch_class, function)

    registry.find_torch_dispatch_rule, holder.register = find_rule, register_rule  # type: ignore[method-assign]


def support_foreach(cls: type) -> None:
    """Have optimizers with ``foreach=None`` take the foreach path for parameters of ``cls``, as they do for plain ones."""
    from torch.optim import optimizer  # type: ignore[attr-defined]
    from torch.utils import _foreach_utils

    for known in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        if cls not in known:
            known.append(cls)


def is_tracing() -> bool:
    """Whether torch.compile, torch.export or a fake tensor mode looks at tensors, as opposed to running on them."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return False
        places = ("/torch/_dynamo/variables/", "/torch/_subclasses/", "/torch/fx/experimental/")
        if any(place in frame.f_code.co_filename for place in places):
            return True
        frame = frame.f_back
    return False


def is_in_legacy_save() -> bool:
    """Whether ``torch.save`` is pickling in its format of before 1.6, whose storages are filled after unpickling."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.serialization._legacy_save.__code__:
            return True
        frame = frame.f_back
    return False


def set_data(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """torch's own ``tensor.data = source``: size, stride, dtype and version of the handle; not what it refers to.

    Under a function mode (``torch.device``, our `default_mesh`) torch's setter calls the property of the class, which is ours, anew.
    """
    with torch._C.DisableTorchFunction():
        torch._C.TensorBase.data.__set__(tensor, source)


def set_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """torch's own ``tensor.grad = grad``, past function modes."""
    with torch._C.DisableTorchFunction():
        torch._C.TensorBase.grad.__set__(tensor, grad)  # type: ignore[attr-defined]


def set_grads(grads: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    """`set_grad` of each, at a third of the cost."""
    put = torch._C.TensorBase.grad.__set__  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunction():
        for tensor, grad in grads:
            put(tensor, grad)


def tell_of_swaps(tell: Callable[[], None]) -> None:
    """Have ``tell`` called after ``torch.utils.swap_tensors``, with which ``module.to(dtype)`` may convert parameters."""
    swap = torch._C._swap_tensor_impl

    def swapped(one: torch.Tensor, other: torch.Tensor) -> None:
        swap(one, other)
        tell()

    torch._C._swap_tensor_impl = swapped


def past_functions() -> Any:
    """A context in which torch looks for no ``__torch_function__``: its getters take half their time on tensors of ours."""
    return torch._C.DisableTorchFunction()


def format_values(plain: torch.Tensor, indent: int) -> str:
    """The values as torch prints them, without the ``tensor(`` around."""
    return torch._tensor_str._tensor_str(plain, indent)


def without_dispatch() -> Any:
    """A context in which ops on our host-backed tensors run as on plain ones."""
    return torch._C._DisableTorchDispatch()


#: ``share_storage(view, base)``: one storage identity for both, by which torch and libraries tell aliases. 0.9 us.
share_storage = torch._functionalize_unsafe_set


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside the wrappers of ``torch.func``."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def constant(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor inside the wrappers of ``torch.func``, if nothing maps it over a dim, or differentiates it but a graph; else None."""
    while forward_ad.unpack_dual(tensor).tangent is None:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return tensor
        if torch._C._functorch.is_batchedtensor(tensor) or tensor.requires_grad:
            return None
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return None


#: A context in which the transforms of ``torch.func`` are passed over: what it makes is not wrapped.
without_func = torch._C._DisableFuncTorch


def _refuse_storages() -> None:
    """Memory of our device type does not exist, and torch 2.13 crashes for want of it: ``torch.UntypedStorage(6, device=x.device)``.

    A DataLoader's worker asks for such when it collates uncommitted tensors.
    """
    make = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == BACKEND:
            raise DTorchError(
                "a dtorch tensor has no storage in this process; a DataLoader with workers collates plain tensors: iterate over it "
                "outside of dtorch.default_mesh, and place the batches with dtorch.from_torch"
            )
        return make(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new  # type: ignore[assignment, method-assign]


def _autocast_as_cpu() -> None:
    """``torch.autocast(x.device.type)`` means the autocast of handles, which to torch's dispatcher are cpu tensors.

    ``torch.autocast`` reaches the dispatcher through these functions of the ``torch`` module alone.
    """

    def translated(function: Any) -> Any:
        def call(*args: Any) -> Any:
            return function(*["cpu" if arg == BACKEND else arg for arg in args])

        call.__name__ = function.__name__
        return call

    for name in ("set_autocast_enabled", "is_autocast_enabled", "set_autocast_dtype", "get_autocast_dtype"):
        setattr(torch, name, translated(getattr(torch, name)))


def last_autograd_node() -> int:
    """The number that autograd gave to the node it made last in this thread: that of the op being dispatched, if it records one."""
    return torch._C._autograd._get_sequence_nr() - 1


def forward_of_backward() -> int | None:
    """The number of the forward op whose backward is running in this thread; None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_backward_of(op: str) -> bool:
    """Whether the backward running in this thread is that of an op whose name, in torch's own spelling, begins with ``op``."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().startswith(op)


#: A context in which autograd's own kernels are passed over: torch's kernel of an op that we override.
below_autograd = torch._C._AutoDispatchBelowAutograd


#: Dispatch keys of handles besides those of a cpu tensor: another backend, with cpu's autocast. It has no kernels, and no device type;
#: but torch asks the kernels of the last backend first, so an override of ours need not stand before those of plain tensors, where it
#: would cost each plain call some microseconds of Python.
HANDLE_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse3).add(torch._C.DispatchKey.AutocastCPU)


def wrapper_arguments(cls: type, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> tuple:
    """What makes a handle, for `make_wrapper`. All by position: looking for names takes as long as all the rest."""
    offset = memory_format = policy = None
    pin_memory = requires_grad = dispatch_device = dispatch_layout = False
    return (
        cls, shape, stride, offset, memory_format, dtype, torch.strided, CPU, pin_memory, requires_grad, policy, dispatch_device,
        dispatch_layout, HANDLE_KEYS,
    )  # fmt: skip


def compose(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op's own C++, whose parts are dispatched. (``op.decompose`` prefers Python if torch has it: 130 us for matmul.)"""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def direct(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """What ``op`` calls: the same without a Python function before it, which takes 0.5 us."""
    return op._op


_overrides = torch.library.Library("aten", "IMPL")


def override(op: torch._ops.OpOverload, function: Callable[..., Any], with_memory: bool = False) -> None:
    """Have the dispatcher call ``function`` for a composite op on our handles, where a placed one is among them.

    Args:
        with_memory: also where all have memory of their own, and so on plain CPU tensors.
    """
    name = op._schema.name.removeprefix("aten::")
    name = f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name
    for key in ("AutogradPrivateUse3", "AutogradCPU")[: 1 + with_memory]:
        _overrides.impl(name, function, key)


def keep_whole(op: torch._ops.OpOverload) -> None:
    """Have an op that has a formula and kernels reach our dispatch as one, with torch's own gradient.

    The dispatcher takes the formula for a backend without a kernel, which that of `HANDLE_KEYS` is. What is registered here never runs: our
    dispatch comes first.
    """

    def kernel(*args: object, **kwargs: object) -> object:
        raise AssertionError(f"{op} was not dispatched to dtorch")

    _overrides.impl(op.name().removeprefix("aten::"), kernel, "PrivateUse3")


def is_in_dispatch_mode() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_autocast = torch._C._is_any_autocast_enabled
_has_profiler = torch._C._autograd._profiler_enabled
_transform = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
_has_function_mode = torch._C._is_torch_function_mode_enabled

#: Whether a tensor among the arguments requires a gradient; no mode is told of the question.
any_requires_grad = torch._C._any_requires_grad

#: What autograd notes of an in-place op on each tensor of a list.
increment_version = torch._C._increment_version


def is_differentiated(*tensors: object) -> bool:
    """Whether a gradient of these may be asked for, or they may have tangents."""
    return (torch.is_grad_enabled() and any_requires_grad(*tensors)) or forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Whether ``torch.func`` or a trace stands before us."""
    return _transform() is not None or _trace() is not None


def is_at_work() -> bool:
    """Whether anything stands before a handle that needs no gradient: a mode, autocast, a profiler, ``torch.func``, a trace."""
    return bool(
        _dispatch_modes()
        or _has_function_mode()
        or _has_autocast()
        or _has_profiler()
        or forward_ad._current_level >= 0
        or _transform() is not None
        or _trace() is not None
    )


def is_intercepted(expected: bool) -> bool:
    """Whether ``torch.func``, a mode (beside a function mode that is ``expected``) or hooks of saved tensors stand before us."""
    return (
        is_in_dispatch_mode()
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or torch._C._len_torch_function_stack() > expected
        or torch._C._functorch.peek_interpreter_stack() is not None
    )
