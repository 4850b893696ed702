"""Bad input to every public function is refused at the call: the kind of error, and the words that say what was given and what is legal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard, _environment, config
from dtorch.errors import DeviceUnavailable, DTorchError, MeshMismatch
from dtorch.placement import partial

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.filterwarnings("ignore")]

Case = tuple[Callable[[Any], Any], type[Exception], str]


@pytest.fixture
def given() -> SimpleNamespace:
    """What the cases use: two meshes and tensors on them."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    x = dtorch.ones(4, 3, device_mesh=mesh, placements=[Shard(0)])
    future = x.to_torch_async()
    return SimpleNamespace(
        mesh=mesh, grid=grid, x=x, other=dtorch.ones(4, 3, device_mesh=DeviceMesh("cpu", [2, 3])), future=future
    )


MESHES: dict[str, Case] = {
    "type": (lambda g: DeviceMesh(3), TypeError, "device_type"),
    "unknown type": (lambda g: DeviceMesh("gpu"), ValueError, "'cpu', 'cuda'.*'gpu'"),
    "no index": (lambda g: DeviceMesh("cpu:"), ValueError, "cpu:"),
    "index and mesh": (lambda g: DeviceMesh("cuda:1", [0]), ValueError, "names one device"),
    "repeated": (lambda g: DeviceMesh("cpu", [0, 1, 0]), ValueError, r"distinct.*\[0\]"),
    "repeated in a tensor": (lambda g: DeviceMesh("cpu", torch.tensor([0, 0])), ValueError, "distinct"),
    "negative": (lambda g: DeviceMesh("cpu", [-1]), ValueError, "negative"),
    "huge": (lambda g: DeviceMesh("cpu", [10**30]), ValueError, "at most"),
    "ragged": (lambda g: DeviceMesh("cpu", [[0, 1], [2]]), ValueError, "ragged"),
    "ragged depth": (lambda g: DeviceMesh("cpu", [0, [1]]), ValueError, "ragged"),
    "none": (lambda g: DeviceMesh("cpu", []), ValueError, "no devices"),
    "none inside": (lambda g: DeviceMesh("cpu", [[]]), ValueError, "no devices"),
    "floats": (lambda g: DeviceMesh("cpu", [0.5]), TypeError, "integer"),
    "float tensor": (lambda g: DeviceMesh("cpu", torch.tensor([0.0])), TypeError, "integers.*float32"),
    "bools": (lambda g: DeviceMesh("cpu", [True]), TypeError, "integer"),
    "a string": (lambda g: DeviceMesh("cpu", "01"), TypeError, "nested list"),
    "too many names": (lambda g: DeviceMesh("cpu", [0, 1], ("a", "b")), ValueError, "each of the 1 axes, got 2"),
    "names as a string": (lambda g: DeviceMesh("cpu", [0, 1], "a"), TypeError, "mesh_dim_names"),
    "names clash": (lambda g: DeviceMesh("cpu", [[0], [1]], ("a", "a")), ValueError, "distinct"),
    "names no strings": (lambda g: DeviceMesh("cpu", [0], (1,)), TypeError, "mesh_dim_names"),
    "init: no devices": (lambda g: dtorch.init_device_mesh("cpu", (2, 0)), ValueError, "at least one device"),
    "init: negative": (lambda g: dtorch.init_device_mesh("cpu", -1), ValueError, "at least one device"),
    "init: float": (lambda g: dtorch.init_device_mesh("cpu", 2.0), TypeError, "mesh_shape"),
    "init: string": (lambda g: dtorch.init_device_mesh("cpu", "2"), TypeError, "mesh_shape"),
    "init: names": (lambda g: dtorch.init_device_mesh("cpu", 2, ("a", "b")), ValueError, "names"),
    "size": (lambda g: g.mesh.size(9), ValueError, "axis 9 is out of range"),
    "size of an absent name": (lambda g: g.mesh.size("dp"), ValueError, r"'dp'.*\['tp'\]"),
    "size of a float": (lambda g: g.mesh.size(1.5), TypeError, "int or a name"),
    "unbind": (lambda g: g.grid.unbind(5), ValueError, "out of range"),
    "unbind by float": (lambda g: g.grid.unbind(1.5), TypeError, "int or a name"),
    "unbind twice": (lambda g: g.grid.unbind(["dp", 0]), ValueError, "twice"),
    "names in a set": (lambda g: g.grid.check_all_dim_names_in_set({"dp"}), ValueError, r"\['tp'\].*\['dp'\]"),
    "names in a string": (lambda g: g.grid.check_all_dim_names_in_set("dp"), TypeError, "set of str"),
    "an axis": (lambda g: g.grid["tp"], KeyError, r"none of the sub-meshes.*unbind\(\['dp'\]\)"),
    "an absent axis": (lambda g: g.grid["pp"], KeyError, "no axis named 'pp'"),
    "axes in another order": (lambda g: g.grid["tp", "dp"], KeyError, "another order"),
    "an index": (lambda g: g.grid[0], TypeError, "axis names, got 0"),
    "iterated": (lambda g: list(g.grid), TypeError, "not iterable"),
    "get_rank": (lambda g: g.grid.get_rank(), AttributeError, r"has no rank.*local_shards"),
    "get_local_rank": (lambda g: g.grid.get_local_rank("tp"), AttributeError, "coordinate"),
    "get_group": (lambda g: g.grid.get_group("tp"), AttributeError, "redistribute"),
    "an absent attribute": (lambda g: g.grid.ranks, AttributeError, "no attribute 'ranks'"),
    "changed": (lambda g: setattr(g.mesh, "shape", (3,)), AttributeError, "does not change"),
    "stages: type": (lambda g: dtorch.assign_layers_to_stages(2.0, 1), TypeError, "num_layers.*int.*float"),
    "stages: none": (lambda g: dtorch.assign_layers_to_stages(2, 0), ValueError, "at least 1"),
    "stages: more than layers": (lambda g: dtorch.assign_layers_to_stages(2, 3), ValueError, "3 stages.*2"),
}

PLACEMENTS: dict[str, Case] = {
    "Shard of a string": (lambda g: Shard("a"), TypeError, "'dim' must be int, not str"),
    "Shard of a bool": (lambda g: Shard(True), TypeError, "'dim' must be int"),
    "Shard of nothing": (lambda g: Shard(), TypeError, "dim"),
    "Partial": (lambda g: Partial("avg"), ValueError, "'sum'.*'avg'"),
    "Partial of a maximum": (lambda g: Partial("max"), ValueError, "'sum'.*'max'"),
}

#: What may be wrong with placements, for a tensor of two dims on one axis; checked wherever placements are taken.
BAD_PLACEMENTS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": ([], ValueError, "has 1, got 0"),
    "too many": ([Shard(0), Shard(1)], ValueError, "has 1, got 2"),
    "out of range": ([Shard(2)], ValueError, r"Shard\(dim=2\).*2-d.*\[-2, 1\]"),
    "out of range below": ([Shard(-3)], ValueError, r"Shard\(dim=-3\).*\[-2, 1\]"),
    "no list": (Shard(0), TypeError, "must be a list"),
    "a string": ("S(0)", TypeError, "must be a list"),
    "strings": (["S(0)"], TypeError, "Shard, Replicate or Partial"),
    "a None": ([None], TypeError, "Shard, Replicate or Partial"),
    "a number": (3, TypeError, "must be a list"),
    "a dict": ({"tp": Shard(0)}, TypeError, "must be a list"),
    "a maximum": ([partial("max")], ValueError, "only sums"),
}

TAKERS: dict[str, Callable[[Any, Any], Any]] = {
    "zeros": lambda g, p: dtorch.zeros(4, 3, device_mesh=g.mesh, placements=p),
    "rand": lambda g, p: dtorch.rand(4, 3, device_mesh=g.mesh, placements=p),
    "eye": lambda g, p: dtorch.eye(4, 3, device_mesh=g.mesh, placements=p),
    "ones_like": lambda g, p: dtorch.ones_like(g.x, placements=p),
    "ones_like of a plain tensor": lambda g, p: dtorch.ones_like(torch.ones(4, 3), device_mesh=g.mesh, placements=p),
    "new_zeros": lambda g, p: g.x.new_zeros(4, 3, placements=p),
    "tensor": lambda g, p: dtorch.tensor([[1], [2]], device_mesh=g.mesh, placements=p),
    "tensor of a tensor": lambda g, p: dtorch.tensor(g.x, placements=p),
    "as_tensor": lambda g, p: dtorch.as_tensor([[1], [2]], device_mesh=g.mesh, placements=p),
    "Tensor": lambda g, p: dtorch.Tensor([[1], [2]], device_mesh=g.mesh, placements=p),
    "from_torch": lambda g, p: dtorch.from_torch(torch.ones(4, 3), g.mesh, p),
    "from_numpy": lambda g, p: dtorch.from_numpy(numpy.ones((4, 3)), g.mesh, p),
    "distribute_tensor": lambda g, p: dtorch.distribute_tensor(torch.ones(4, 3), g.mesh, p),
    "redistribute": lambda g, p: g.x.redistribute(placements=p),
    "dtorch.redistribute": lambda g, p: dtorch.redistribute(g.x, g.mesh, p),
}

CREATION: dict[str, Case] = {
    "a misspelt name": (lambda g: dtorch.zeros(2, placement=[Shard(0)]), TypeError, "'placement'; did you mean 'placements'"),
    "a misspelt name of a like": (lambda g: dtorch.ones_like(g.x, mesh=g.mesh), TypeError, "'mesh'; did you mean"),
    "an unknown name": (lambda g: dtorch.rand(2, zzz=1), TypeError, r"rand\(\).*'zzz'$"),
    "shard of a 0-d tensor": (lambda g: dtorch.zeros((), device_mesh=g.mesh, placements=[Shard(0)]), ValueError, "0-d"),
    "mesh": (lambda g: dtorch.zeros(4, device_mesh="cpu"), TypeError, "'device_mesh' must be a DeviceMesh, not str"),
    "mesh of ids": (lambda g: dtorch.from_torch(torch.ones(2), [0, 1]), TypeError, "'device_mesh' must be a DeviceMesh"),
    "mesh of distribute_tensor": (lambda g: dtorch.distribute_tensor(torch.ones(2), "cpu"), TypeError, "'device_mesh'"),
    "device and mesh": (lambda g: dtorch.zeros(4, device="cpu", device_mesh=g.mesh), ValueError, "device= and device_mesh="),
    "device and mesh of like": (lambda g: dtorch.zeros_like(g.x, device="cpu", device_mesh=g.mesh), ValueError, "device="),
    "device and mesh of tensor": (lambda g: dtorch.tensor(g.x, device="cpu", device_mesh=g.mesh), ValueError, "device="),
    "device and mesh of new": (lambda g: g.x.new_ones(2, device="cpu", device_mesh=g.mesh), ValueError, "device="),
    "device and placements": (lambda g: dtorch.zeros(4, device="cpu", placements=[Shard(0)]), ValueError, "device= and placements="),
    "unknown device": (lambda g: dtorch.zeros(4, device="gpu"), RuntimeError, "gpu"),
    "another device": (lambda g: dtorch.zeros(4, device="mps"), ValueError, "cpu, cuda or dtorch.*'mps'"),
    "meta device": (lambda g: dtorch.zeros(4, device="meta"), ValueError, "cpu, cuda or dtorch.*'meta'"),
    "cuda": (lambda g: dtorch.zeros(4, device="cuda"), DeviceUnavailable, "only cpu.*cuda:0"),
    "cuda mesh": (lambda g: dtorch.rand(4, device_mesh=DeviceMesh("cuda", [0, 1])), DeviceUnavailable, "cuda"),
    "cuda of like": (lambda g: dtorch.ones_like(g.x, device="cuda"), DeviceUnavailable, "cuda"),
    "cuda of new": (lambda g: g.x.new_zeros(2, device="cuda"), DeviceUnavailable, "cuda"),
    "cuda of to": (lambda g: g.x.to("cuda"), DeviceUnavailable, "cuda"),
    "cuda()": (lambda g: g.x.cuda(), DeviceUnavailable, "cuda"),
    "cuda of redistribute": (lambda g: g.x.redistribute(DeviceMesh("cuda", [0, 1])), DeviceUnavailable, "cuda"),
    "one device for many": (lambda g: g.x.to("cuda:0"), ValueError, "one device.*redistribute"),
    "to another device": (lambda g: g.x.to("mps"), ValueError, "cpu, cuda or dtorch"),
    "negative size": (lambda g: dtorch.zeros(-1, 2, device_mesh=g.mesh), RuntimeError, "negative dimension -1"),
    "negative eye": (lambda g: dtorch.eye(-2, device_mesh=g.mesh), RuntimeError, "n must be greater"),
    "negative randperm": (lambda g: dtorch.randperm(-3, device_mesh=g.mesh), RuntimeError, "negative"),
    "size of a float": (lambda g: dtorch.zeros(1.5, device_mesh=g.mesh), TypeError, "'size'.*float"),
    "dtype as a string": (lambda g: dtorch.zeros(4, dtype="float32", device_mesh=g.mesh), TypeError, "must be torch.dtype, not str"),
    "dtype as a string, like": (lambda g: dtorch.ones_like(g.x, dtype="float32"), TypeError, "'dtype' must be torch.dtype, not str"),
    "dtype as a string, tensor": (lambda g: dtorch.tensor([1], dtype="float32"), TypeError, "'dtype' must be torch.dtype, not str"),
    "unknown keyword": (lambda g: dtorch.zeros(4, mesh=g.mesh), TypeError, "'mesh'"),
    "layout": (lambda g: dtorch.zeros(4, layout=torch.sparse_coo), ValueError, "dense"),
    "ints with a gradient": (lambda g: dtorch.zeros(4, dtype=torch.int64, requires_grad=True), RuntimeError, "floating point"),
    "int data with a gradient": (lambda g: dtorch.tensor([1], requires_grad=True), RuntimeError, "floating point"),
    "requires_grad": (lambda g: dtorch.zeros(4, requires_grad="yes"), TypeError, "'requires_grad' must be bool, not str"),
    "out=": (lambda g: dtorch.zeros(4, out=g.x), TypeError, "out=.*copy_"),
    "generator": (lambda g: dtorch.rand(4, generator=3, device_mesh=g.mesh), TypeError, "'generator' must be torch.Generator, not int"),
    "random bounds": (lambda g: dtorch.randint(5, 2, (3,), device_mesh=g.mesh), RuntimeError, "from=5 >= to=2"),
    "random bounds of the dtype": (lambda g: dtorch.randint(300, (3,), dtype=torch.uint8, device_mesh=g.mesh), RuntimeError, "bounds"),
    "random ints": (lambda g: dtorch.rand(3, dtype=torch.int64, device_mesh=g.mesh), NotImplementedError, "not implemented for 'Long'"),
    "step": (lambda g: dtorch.arange(0, 3, 0, device_mesh=g.mesh), RuntimeError, "step must be nonzero"),
    "fill": (lambda g: dtorch.full((3,), "x", device_mesh=g.mesh), TypeError, "fill_value"),
    "no fill": (lambda g: dtorch.full((3,), device_mesh=g.mesh), TypeError, "fill_value"),
    "fill of the dtype": (lambda g: dtorch.full((3,), 300, dtype=torch.uint8, device_mesh=g.mesh), RuntimeError, "overflow"),
    "ragged data": (lambda g: dtorch.tensor([[1], [1, 2]], device_mesh=g.mesh), ValueError, "length 1 at dim 1"),
    "no data": (lambda g: dtorch.tensor(None), RuntimeError, "NoneType"),
    "Tensor of a string": (lambda g: dtorch.Tensor("x"), TypeError, "str"),
    "Tensor: mesh by position": (lambda g: dtorch.Tensor([1.0], g.mesh), TypeError, "device_mesh="),
    "Tensor: keyword": (lambda g: dtorch.Tensor([1.0], mesh=g.mesh), TypeError, "'mesh'; did you mean 'device_mesh'"),
    "from_torch of a list": (lambda g: dtorch.from_torch([1]), TypeError, "torch.Tensor, not list"),
    "distribute_tensor of a list": (lambda g: dtorch.distribute_tensor([1.0], g.mesh), TypeError, "torch.Tensor, not list"),
    "from_numpy of a list": (lambda g: dtorch.from_numpy([1]), TypeError, "ndarray"),
    "from_numpy of strings": (lambda g: dtorch.from_numpy(numpy.array(["a"])), TypeError, "numpy.str_"),
    "like of a list": (lambda g: dtorch.zeros_like([1]), TypeError, "must be Tensor, not list"),
    "sparse": (lambda g: dtorch.from_torch(torch.eye(3).to_sparse()), ValueError, "dense tensors only.*sparse_coo.*to_dense"),
    "sparse, placed": (lambda g: dtorch.from_torch(torch.eye(3).to_sparse_csr(), g.mesh), ValueError, "sparse_csr"),
    "sparse data": (lambda g: dtorch.tensor(torch.eye(3).to_sparse()), ValueError, "dense"),
    "sparse operand": (lambda g: g.x @ torch.eye(3).to_sparse(), ValueError, "dense"),
    "to_sparse": (lambda g: g.x.to_sparse(), TypeError, "dense.*to_torch"),
    "nested": (lambda g: dtorch.from_torch(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), ValueError, "nested"),
    "nested operand": (lambda g: g.x + torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), ValueError, "nested"),
    "quantised": (
        lambda g: dtorch.from_torch(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), g.mesh), ValueError, "dequantize"
    ),
    "to quantise": (lambda g: torch.quantize_per_tensor(g.x, 0.1, 0, torch.quint8), TypeError, "quantised.*to_torch"),
    "meta": (lambda g: dtorch.from_torch(torch.ones(3, device="meta"), g.mesh), ValueError, "meta device has no values"),
    "meta operand": (lambda g: g.x + torch.ones(3, device="meta"), ValueError, "meta device has no values"),
}  # fmt: skip

TENSORS: dict[str, Case] = {
    "redistribute: mesh": (lambda g: g.x.redistribute("cpu"), TypeError, "'device_mesh' must be a DeviceMesh"),
    "redistribute: placements first": (lambda g: g.x.redistribute([Shard(0)]), TypeError, r"x\.redistribute\(placements="),
    "redistribute: a placement": (lambda g: g.x.redistribute(Replicate()), TypeError, r"x\.redistribute\(placements="),
    "redistribute: another number of axes": (lambda g: g.x.redistribute(g.grid), ValueError, "placements are needed"),
    "dtorch.redistribute: a list": (lambda g: dtorch.redistribute([1], g.mesh, [Shard(0)]), TypeError, "tensor, not list"),
    "dtorch.redistribute: plain": (lambda g: dtorch.redistribute(torch.ones(2), g.mesh, [Shard(0)]), TypeError, "from_torch"),
    "redistribute_like": (lambda g: g.x.redistribute_like(torch.ones(2)), TypeError, "dtorch.Tensor"),
    "by_dict: mode": (lambda g: g.x.redistribute_by_dict(default_placement_mode="x"), ValueError, "'replicate', 'keep'.*'x'"),
    "by_dict: axis not named": (lambda g: g.x.redistribute_by_dict(placements_dict={}), ValueError, "'tp'.*replicate"),
    "by_dict: placement": (lambda g: g.x.redistribute_by_dict(placements_dict={"tp": 3}), TypeError, "Shard, Replicate or Partial, got 3"),
    "by_dict: a list": (lambda g: g.x.redistribute_by_dict(placements_dict=[("tp", Replicate())]), TypeError, "dict"),
    "by_dict: the dict first": (lambda g: g.x.redistribute_by_dict({"tp": Replicate()}), TypeError, "'device_mesh'.*dict"),
    "by_dict: a mesh without names": (
        lambda g: g.x.redistribute_by_dict(DeviceMesh("cpu", [2, 3]), {"tp": Replicate()}), ValueError, "no axis names"
    ),
    "check_placement: axis": (lambda g: g.x.check_placement("dp", Shard(0)), ValueError, r"'dp'.*\['tp'\]"),
    "check_placement: dim": (lambda g: g.x.check_placement("tp", Shard(9)), ValueError, "out of range"),
    "check_placement: a string": (lambda g: g.x.check_placement("tp", "S(0)"), TypeError, "Shard, Replicate or Partial"),
    "meshes differ": (lambda g: g.x + g.other, MeshMismatch, r"\[0, 1\].*\[2, 3\].*redistribute"),
    "meshes differ in place": (lambda g: g.x.add_(g.other), MeshMismatch, r"\[0, 1\].*\[2, 3\]"),
    "meshes differ in a list": (lambda g: torch.cat([g.x, g.other]), MeshMismatch, r"\[0, 1\].*\[2, 3\]"),
    "a plain destination": (lambda g: torch.ones(4, 3).add_(g.x), dtorch.errors.DTorchError, "plain.*from_torch"),
    "a plain out=": (lambda g: torch.add(g.x, g.x, out=torch.ones(4, 3)), TypeError, "plain.*from_torch"),
    "resize_": (lambda g: g.x.resize_(2, 2), RuntimeError, "cannot be resized"),
    "numpy with a gradient": (lambda g: dtorch.ones(2, requires_grad=True).numpy(), RuntimeError, "detach"),
    "data_ptr": (lambda g: g.x.data_ptr(), RuntimeError, "to_torch"),
    "dlpack": (lambda g: torch.from_dlpack(g.x), RuntimeError, "to_torch"),
}  # fmt: skip

RUNNING: dict[str, Case] = {
    "to_local": (lambda g: g.x.to_local(), AttributeError, "local_shards"),
    "from_local": (lambda g: dtorch.Tensor.from_local(g.x), AttributeError, "from_torch"),
    "to a mesh": (lambda g: g.x.to(g.mesh), TypeError, r"x\.redistribute\(mesh"),
    "to device= a mesh": (lambda g: g.x.to(device=g.mesh), TypeError, r"x\.redistribute\(mesh"),
    "module to a mesh": (lambda g: torch.nn.Linear(2, 2).to(g.mesh), TypeError, r"dtorch\.distribute_module"),
    "DistributedDataParallel": (
        lambda g: torch.nn.parallel.DistributedDataParallel(torch.nn.ParameterList([g.x])),
        TypeError,
        r"distribute_module\(module, mesh\).*Shard\(0\)",
    ),
    "init twice": (lambda g: dtorch.init(), DTorchError, "shutdown"),
    "init: engine": (lambda g: dtorch.init(engine="threads"), ValueError, "'processes', 'simulate'.*'threads'"),
    "init: engine type": (lambda g: dtorch.init(engine=3), TypeError, "engine must be a str"),
    "init: no devices": (lambda g: dtorch.init(devices=0), ValueError, "at least 1, got 0"),
    "init: devices": (lambda g: dtorch.init(devices="4"), TypeError, "devices must be an int"),
    "init: bool devices": (lambda g: dtorch.init(devices=True), TypeError, "devices must be an int"),
    "init: threads": (lambda g: dtorch.init(threads_per_worker=-1), ValueError, "at least 1, got -1"),
    "init: imports": (lambda g: dtorch.init(worker_imports=3), TypeError, "list of module names"),
    "init: imports of numbers": (lambda g: dtorch.init(worker_imports=[3]), TypeError, "list of module names"),
    "init: an absent import": (lambda g: dtorch.init(worker_imports=["nowhere"]), ValueError, "'nowhere'.*sys.path"),
    "init: an absent part": (lambda g: dtorch.init(worker_imports=["json.nowhere"]), ValueError, "'json.nowhere'"),
    "init: a part of no package": (lambda g: dtorch.init(worker_imports=["heapq.x"]), ValueError, "'heapq.x'"),
    "init: no import": (lambda g: dtorch.init(worker_imports=[""]), ValueError, "names ''"),
    "init: sync": (lambda g: dtorch.init(sync="yes"), TypeError, "sync must be a bool"),
    "init: random": (lambda g: dtorch.init(random="philox"), ValueError, "'counter', 'torch'.*'philox'"),
    "init: arena type": (
        lambda g: dtorch.init(arena_bytes="1 GB"),
        TypeError,
        "arena_bytes must be an int, got '1 GB'",
    ),
    "init: arena": (
        lambda g: dtorch.init(arena_bytes=4096),
        ValueError,
        "arena_bytes must be at least 65536, got 4096",
    ),
    "init: a name": (lambda g: dtorch.init(threads=2), TypeError, "'threads'"),
    "default_mesh": (lambda g: dtorch.default_mesh("cpu"), TypeError, "'mesh' must be a DeviceMesh"),
    "memory_stats": (lambda g: dtorch.memory_stats("cpu"), TypeError, "'mesh' must be a DeviceMesh"),
    "memory_stats: peak": (lambda g: dtorch.memory_stats(reset_peak="x"), TypeError, "'reset_peak' must be bool"),
    "manual_seed": (lambda g: dtorch.manual_seed("x"), ValueError, "'x'"),
    "an absent name": (lambda g: dtorch.no_such_name, AttributeError, "no_such_name"),
    "timeout": (lambda g: g.future.get(-1), ValueError, "at least 0 seconds, got -1"),
    "timeout not a number": (lambda g: g.future.wait(float("nan")), ValueError, "nan"),
    "timeout of another type": (lambda g: g.future.exception("1"), TypeError, "number of seconds"),
    "callback": (lambda g: g.future.add_done_callback(3), TypeError, "callable, got 3"),
    "as_completed": (lambda g: dtorch.as_completed(g.future), TypeError, "iterable of TensorFuture"),
    "as_completed of values": (lambda g: dtorch.as_completed([g.x]), TypeError, "TensorFutures"),
    "as_completed: timeout": (lambda g: dtorch.as_completed([g.future], timeout=-1), ValueError, "at least 0"),
    "Graph: mesh": (lambda g: dtorch.default_graph().device_mesh_guard("cpu").__enter__(), TypeError, "DeviceMesh"),
    "Graph: dtype": (lambda g: dtorch.default_graph().dtype_guard("float32").__enter__(), TypeError, "dtype"),
    "Graph: satisfy": (lambda g: dtorch.default_graph().satisfy("cpu"), TypeError, "'mesh' must be a DeviceMesh"),
}


def check(case: Case, given: Any) -> None:
    call, kind, words = case
    with pytest.raises(kind, match=f"(?s){words}") as raised:
        call(given)
    # As torch's: the kind itself, not a relative. (RuntimeError is what torch raises for most.)
    assert type(raised.value) is kind
    dtorch.synchronize()  # and nothing was sent to the workers


@pytest.mark.parametrize("name", MESHES)
def test_meshes(name: str, given: Any) -> None:
    check(MESHES[name], given)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_placements(name: str, given: Any) -> None:
    check(PLACEMENTS[name], given)


@pytest.mark.parametrize("wrong", BAD_PLACEMENTS)
@pytest.mark.parametrize("taker", TAKERS)
def test_placements_wherever_they_are_taken(taker: str, wrong: str, given: Any) -> None:
    placements, kind, words = BAD_PLACEMENTS[wrong]
    check((lambda g: TAKERS[taker](g, placements), kind, words), given)


@pytest.mark.parametrize("name", CREATION)
def test_creation(name: str, given: Any) -> None:
    check(CREATION[name], given)


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, given: Any) -> None:
    check(TENSORS[name], given)


@pytest.mark.parametrize("name", RUNNING)
def test_running(name: str, given: Any) -> None:
    check(RUNNING[name], given)


AFTER_SHUTDOWN: dict[str, Callable[[Any], Any]] = {
    "a new tensor": lambda g: dtorch.zeros(3, device_mesh=g.mesh),
    "an op": lambda g: g.x + 1,
    "an in-place op": lambda g: g.x.add_(1),
    "a view": lambda g: g.x[0],
    "redistribute": lambda g: g.x.redistribute(placements=[Replicate()]),
    "to_torch": lambda g: g.x.to_torch(),
    "to_torch_async": lambda g: g.x.to_torch_async(),
    "local_shards": lambda g: g.x.local_shards(),
    "print": lambda g: repr(g.x),
}


@pytest.mark.parametrize("restarted", [False, True], ids=["ended", "restarted"])
def test_use_after_shutdown(given: Any, restarted: bool) -> None:
    dtorch.shutdown()
    dtorch.shutdown()  # twice is fine
    try:
        if restarted:
            dtorch.init(engine="simulate")
        for name, call in AFTER_SHUTDOWN.items():
            if restarted and name == "a new tensor":
                continue
            with pytest.raises(DTorchError, match="shut down"):
                call(given)
    finally:
        if not restarted:
            dtorch.init(engine="simulate")


VARIABLES = {
    "DTORCH_ENGINE": ("threads", "'processes', 'simulate'.*'threads'"),
    "DTORCH_DEVICES": ("many", "DTORCH_DEVICES must be an integer, got 'many'"),
    "DTORCH_THREADS_PER_WORKER": ("0", "threads_per_worker must be at least 1, got 0"),
    "DTORCH_SYNC": ("perhaps", "DTORCH_SYNC must be 0 or 1, got 'perhaps'"),
    "DTORCH_ARENA_BYTES": ("1GB", "DTORCH_ARENA_BYTES must be an integer, got '1GB'"),
    "DTORCH_RANDOM": ("dice", "'counter', 'torch'.*'dice'"),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_environment_variables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, words = VARIABLES[name]
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        config.from_environment()


def test_a_misspelt_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTORCH_ENGIN", "simulate")
    with pytest.warns(UserWarning, match="DTORCH_ENGIN .*DTORCH_ENGINE"):
        config.from_environment()


def test_unsupported_python_and_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment.check()
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(ImportError, match=r"PyTorch 2\.13.*2\.12\.1.*pip install"):
        _environment.check()
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(ImportError, match=r"Python 3\.10 or newer"):
        _environment.check()


def test_a_bad_log_level_fails_the_import() -> None:
    script = [sys.executable, "-c", "import os; os.environ['DTORCH_LOG'] = 'loud'; import dtorch"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "DTORCH_LOG must be one of debug" in done.stderr
