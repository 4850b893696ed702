"""Each private torch API that dtorch relies on still does what dtorch needs of it. Where one fails, `torch_internals` must change."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch.client import handles, torch_internals
from dtorch.errors import DTorchError

pytestmark = pytest.mark.usefixtures("simulated")


class Handle(torch.Tensor):
    """A wrapper subclass of this test's own, with no more than torch gives it."""

    __torch_function__ = torch_internals.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        seen.append(func)
        return handle()


#: The ops that a `Handle` was asked to run.
seen: list[object] = []


def handle(shape: tuple[int, ...] = (2, 3), stride: tuple[int, ...] = (3, 1)) -> torch.Tensor:
    return torch_internals.make_wrapper(
        *torch_internals.wrapper_arguments(Handle, torch.Size(shape), stride, torch.float32)
    )


def placed() -> dtorch.Tensor:
    return dtorch.ones(4, 3, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])


def test_make_wrapper_subclass_has_metadata_and_no_memory() -> None:
    made = handle((2, 3), (1, 2))
    assert type(made) is Handle
    assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.float32, "cpu")
    with pytest.raises(NotImplementedError, match="'PrivateUse3' backend"):
        torch.tensor([handle((), ())]).sum()


def test_wrappers_reach_torch_dispatch_below_autograd() -> None:
    seen.clear()
    result = torch.add(handle().requires_grad_(), 1)
    assert seen == [torch.ops.aten.add.Tensor]
    assert type(result.grad_fn).__name__ == "AddBackward0"


def test_make_subclass_shares_memory() -> None:
    plain = torch.zeros(2)
    made = torch_internals.make_subclass(Handle, plain)
    plain += 1
    with torch_internals.without_dispatch():
        assert made.sum().item() == 2


def test_without_dispatch_runs_a_subclass_as_plain() -> None:
    made = torch_internals.make_subclass(Handle, torch.ones(2))
    seen.clear()
    with torch_internals.without_dispatch():
        assert torch.add(made, 1).tolist() == [2.0, 2.0]
    assert seen == []


def test_set_data_changes_the_metadata_of_a_handle() -> None:
    one, two = handle(), handle((4,), (1,))
    torch_internals.set_data(one, two)
    assert (one.shape, one.stride()) == ((4,), (1,))


def test_share_storage_makes_one_identity() -> None:
    base, view = handle(), handle((3,), (1,))
    assert base.untyped_storage()._cdata != view.untyped_storage()._cdata
    torch_internals.share_storage(view, base)
    assert base.untyped_storage()._cdata == view.untyped_storage()._cdata


def test_format_values() -> None:
    assert torch_internals.format_values(torch.tensor([1.0, 2.5]), 7) == "[1.0000, 2.5000]"
    options = torch._tensor_str.PRINT_OPTS  # what `display` reads and sets
    assert {"threshold", "edgeitems"} <= set(vars(options))


def test_print_options_are_what_set_printoptions_sets() -> None:
    before = torch_internals.print_options.threshold
    torch.set_printoptions(threshold=before + 1)
    try:
        assert torch_internals.print_options.threshold == before + 1
    finally:
        torch.set_printoptions(threshold=before)


def test_innermost_unwraps_the_tensors_of_torch_func() -> None:
    found = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_internals.innermost(x))
        return x.sum()

    x = placed()
    torch.func.grad(inner)(x)
    torch.func.vmap(torch.func.grad(inner))(x)
    assert [type(t) for t in found] == [dtorch.Tensor] * 2


def test_the_device_type_makes_tensors_of_ours() -> None:
    device = torch_internals.device()
    assert (device.type, device.index) == ("dtorch", 0)
    assert torch_internals.is_our_device("dtorch")
    for made in (
        torch.zeros(2, device=device),  # empty.memory_format
        torch.empty_strided((2,), (1,), device=device),  # empty_strided
        torch.tensor([1.0, 2.0], device=device),  # written into by torch itself
        torch.ones(2).to(device),  # _copy_from
        torch.arange(2, device="dtorch"),
    ):
        assert type(made) is dtorch.Tensor
    assert torch.equal(torch.tensor([1.0, 2.0], device=device).to_torch(), torch.tensor([1.0, 2.0]))


def test_the_device_module() -> None:
    assert torch.get_device_module("dtorch") is torch.dtorch
    with torch.random.fork_rng(device_type="dtorch"):
        torch.manual_seed(3)


def test_the_accelerator_is_the_one_there_was_before() -> None:
    """As torch alone says in a process without dtorch; the machines that run this have no accelerator."""
    accelerator = torch.accelerator
    if accelerator.current_accelerator() is not None:
        pytest.skip("this torch has an accelerator")
    assert not accelerator.is_available()
    assert accelerator.device_count() == 0
    assert torch.get_device_module() is torch.cpu
    for call in (
        accelerator.synchronize,
        accelerator.memory_allocated,
        accelerator.current_device_index,
        accelerator.current_stream,
        accelerator.empty_cache,
        accelerator.empty_host_cache,
        accelerator.get_memory_info,
        lambda: accelerator.device_index(0).__enter__(),
        lambda: torch.ones(2).pin_memory(),
    ):
        with pytest.raises(RuntimeError, match=r"^Cannot access accelerator device when none is available"):
            call()
    assert not torch.ones(2).is_pinned()
    assert not placed().is_pinned()


def test_what_asks_for_an_accelerator_works_as_without_dtorch() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    batches = list(torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True))
    assert [batch.tolist() for (batch,) in batches] == [[0.0, 1.0], [2.0, 3.0]]
    model = torch.nn.DataParallel(torch.nn.Linear(4, 4))
    assert type(model(torch.ones(2, 4))) is torch.Tensor
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_every_entry_point_to_the_accelerator_is_known() -> None:
    """All names that `_keep_accelerator` replaces or leaves; the functions of torch.cuda that take their place exist."""
    names = {name for name in dir(torch._C) if name.startswith("_accelerator_")}
    left = {"_accelerator_getAllocatorSettings", "_accelerator_setAllocatorSettings"}
    hooks = {name for name in names if name.startswith("_accelerator_hooks_")}
    others = {"getAccelerator", "getDeviceCapability", "emptyHostCache", *torch_internals._OF_CUDA}
    assert names == left | hooks | {f"_accelerator_{name}" for name in others}


def test_autocast_of_the_device_type_is_that_of_handles() -> None:
    x = placed()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("dtorch")
        assert (x.t() @ x).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_foreach_optimizers_know_their_types() -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach
    from torch.utils._foreach_utils import _foreach_supported_types

    assert dtorch.Tensor in _foreach_supported_types
    assert _default_to_fused_or_foreach([placed()], differentiable=False) == (False, True)


def test_plain_torch_compile_still_has_a_device_guard() -> None:
    assert torch._C._acc.DeviceGuard
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]


def test_dlpack_asks_the_subclass() -> None:
    with pytest.raises(RuntimeError, match="to_torch"):
        torch.utils.dlpack.to_dlpack(placed())
    assert torch.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(2))).tolist() == [1.0, 1.0]


def test_factories_read_lists_of_handles() -> None:
    numbers = list(placed().sum(0).unbind())
    for make in (torch.tensor, torch.as_tensor, torch.asarray):
        assert make(numbers).tolist() == [4.0, 4.0, 4.0]
    assert torch.jit.script(_scripted)(2).tolist() == [2.0]


def _scripted(n: int) -> torch.Tensor:
    return torch.tensor([float(n)])


def test_factory_modes_know_the_factories() -> None:
    from torch.utils._device import _device_constructors

    assert {torch.zeros, torch.arange, torch.randn} <= _device_constructors()
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta


def test_an_override_of_a_composite_reaches_handles_and_leaves_plain_tensors_alone() -> None:
    q = torch.rand(1, 1, 4, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    ours = dtorch.from_torch(q, DeviceMesh("cpu", [0, 1]), [Shard(2)])
    found = torch.nn.functional.scaled_dot_product_attention(ours, ours, ours)
    torch.testing.assert_close(found.to_torch(), expected)
    with torch_internals.below_autograd():
        assert (torch.ones(2, requires_grad=True) * 2).grad_fn is None


def test_tracing_is_recognised() -> None:
    assert not torch_internals.is_tracing()
    with pytest.raises(Exception, match="cannot trace dtorch tensors"):
        torch.compile(lambda x: x + 1, backend="eager")(placed())


def test_hooks_of_saved_tensors_are_recognised() -> None:
    assert not torch_internals.is_intercepted(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert torch_internals.is_intercepted(False)


def test_the_dispatcher_hands_ops_over_whole_under_a_mode() -> None:
    names = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func)
            return func(*args, **(kwargs or {}))

    x = placed()
    with Log():
        x + 1
    assert names == [torch.ops.aten.add.Tensor]


def test_a_backward_op_knows_the_number_of_its_forward_op() -> None:
    numbers = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            backward = torch_internals.forward_of_backward()
            numbers.append((func, torch_internals.last_autograd_node() if backward is None else backward))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Log():
        y = x.exp()
        z = y.sin()
        torch.autograd.grad(z, x, torch.ones(2))
    exp, sin = (node._sequence_nr() for node in (y.grad_fn, z.grad_fn))
    aten = torch.ops.aten
    assert {(aten.exp.default, exp), (aten.sin.default, sin), (aten.cos.default, sin)} <= set(numbers)
    assert [number for func, number in numbers if func is aten.mul.Tensor] == [sin, exp]


def test_the_op_whose_backward_runs_is_known_by_its_name() -> None:
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.cat.default:
                seen.append((torch_internals.is_backward_of("Split"), torch_internals.is_backward_of("Cat")))
            return func(*args, **(kwargs or {}))

    x = torch.ones(4, requires_grad=True)
    with Log():
        for split in (lambda t: t.chunk(2), lambda t: t.split([2, 2])):
            a, b = split(x)
            torch.autograd.grad((torch.cat([a, b]) * a.repeat(2)).sum(), x)
    assert seen == [(False, False), (True, False)] * 2


def test_placements_of_torch_are_those_of_its_core() -> None:
    from torch._C import _distributed

    assert {"Placement", "Shard", "Replicate", "Partial"} <= set(dir(_distributed))
    assert issubclass(torch.distributed.tensor.Shard, _distributed.Shard)


@pytest.mark.parametrize("device", ["dtorch", "dtorch:0", torch.device("dtorch", 0)])
def test_a_storage_of_our_device_type_is_refused_and_others_are_not(device) -> None:
    """torch 2.13 crashes there. Run in this process: a crash would end the run."""
    with pytest.raises(DTorchError, match="has no storage in this process"):
        torch.UntypedStorage(6, device=device)
    assert torch.UntypedStorage(6, device="cpu").nbytes() == 6
    assert torch.UntypedStorage([1, 2]).tolist() == [1, 2]


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def test_a_data_loader_with_workers_inside_a_default_mesh_says_what_to_do() -> None:
    with dtorch.default_mesh(dtorch.DeviceMesh("cpu", [0])):
        loader = torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=1)
        with pytest.raises(DTorchError, match="place the batches with dtorch"):
            list(loader)


def test_swaps_of_tensors_are_told_of() -> None:
    before = handles.version
    one, other = placed(), placed() + 1
    told = handles.version
    assert told is before
    torch.utils.swap_tensors(one, other)
    assert handles.version is not told
    assert other.to_torch().sum().item() == 12


def test_getters_past_functions_are_torch_s_own() -> None:
    one = placed().requires_grad_()
    with torch_internals.past_functions():
        assert torch._C.TensorBase.requires_grad.__get__(one)
        assert torch._C.TensorBase.grad.__get__(one) is None


def test_rules_for_our_class_are_found_once_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`expect_no_rules` stands in torch's place when it first dispatches, and gives way to `register_torch_dispatch`."""
    registry = torch._library.simple_registry.SimpleLibraryRegistry
    find, looked = registry.find, []
    monkeypatch.setattr(registry, "find", lambda self, name: looked.append(name) or find(self, name))
    x = placed()
    found = x + x
    assert "aten::add.Tensor" not in looked

    @torch.library.custom_op("dtorch_test::five_times", mutates_args=())
    def five_times(x: torch.Tensor) -> torch.Tensor:
        return x * 5

    five_times.register_torch_dispatch(dtorch.Tensor, lambda mode, func, types, args, kwargs: args[0] * 2)
    assert torch.equal(five_times(x).to_torch(), found.to_torch())
    assert torch.equal(torch.add(x, x).to_torch(), found.to_torch())
    assert "aten::add.Tensor" in looked


def test_what_is_at_work() -> None:
    """Each of what `is_at_work` asks for is told of while it stands before a handle, and only then."""
    x = placed()

    def at_work_in(context: object) -> bool:
        with context:  # type: ignore[attr-defined]
            return torch_internals.is_at_work()

    class Functions(torch.overrides.TorchFunctionMode):
        pass

    class Ops(TorchDispatchMode):
        pass

    assert not torch_internals.is_at_work()
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        assert not at_work_in(context)
    for context in (
        Functions(), Ops(), torch.autocast("cpu", torch.bfloat16), torch.device("cpu"), torch.autograd.forward_ad.dual_level(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ):  # fmt: skip
        assert at_work_in(context), context
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.is_at_work())
        return x * 2

    torch.func.vmap(look)(x)
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    assert all(seen)
    assert not torch_internals.is_at_work()


def test_any_requires_grad_is_told_to_nobody() -> None:
    asked: list[object] = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            asked.append(func)
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    plain, leaf = placed(), placed().requires_grad_()
    result = leaf * 2
    with torch.no_grad(), Functions():
        told = [torch_internals.any_requires_grad(*given) for given in ((plain, plain), (plain, leaf), (result, plain))]
    assert told == [False, True, True]
    assert not asked


def test_increment_version_is_what_autograd_counts() -> None:
    x = placed()
    torch_internals.increment_version([x])
    assert x._version == 1
