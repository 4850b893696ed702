"""``dtorch.compile(..., backend="inductor")``: what workers compile gives what plain torch gives."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch.errors import RemoteError
from dtorch.worker import fused

MESH = DeviceMesh("cpu", [0, 1])


def layer(x, w):
    h = torch.nn.functional.gelu(x @ w).softmax(-1)
    return h, (h * 2).t()[0]


def check(calls: int) -> None:
    """Recorded, run op by op and compiled from, and as compiled; rows are unevenly split, results share memory as torch's do."""
    x, w = torch.randn(5, 8), torch.randn(8, 6)
    ours = dtorch.distribute_tensor(x, MESH, [Shard(0)]), dtorch.distribute_tensor(w, MESH)
    compiled = dtorch.compile(layer, backend="inductor")
    for _ in range(calls):
        found, expected = compiled(*ours), layer(x, w)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.to_torch(), other)
            assert one.stride() == other.stride()
        found[0].zero_()
        torch.testing.assert_close(found[1].to_torch(), expected[1])
    assert "compiled(" in str(compiled.program)


@pytest.fixture
def workers():
    """Real ones, whatever other tests of the module run on."""
    dtorch.shutdown()
    dtorch.init(engine="processes")
    yield
    dtorch.shutdown()


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler")
def test_what_inductor_compiles(workers):
    check(3)


@pytest.fixture
def as_a_graph(monkeypatch):
    """What is fused runs as the graph that inductor would get."""
    monkeypatch.setattr(fused, "by_inductor", lambda module, inputs: module)


def test_results_that_a_compiler_made_one_are_taken_apart(simulated, monkeypatch):
    kept = {}

    def careless(module, inputs):
        """Results that are one tensor where they are equal, and the same at every call; an input where that is the result."""

        def function(*tensors):
            first, second, _ = module(*tensors)
            one = kept.setdefault(tensors[0].storage_offset(), first)
            one.copy_(first)
            assert torch.equal(first, second)
            return one, one, tensors[0]

        return function

    monkeypatch.setattr(fused, "by_inductor", careless)
    x = torch.arange(6.0).view(2, 3)
    ours = dtorch.distribute_tensor(x, MESH)
    compiled = dtorch.compile(lambda x: (x * 2 + 1, x.add(x).add(1), x.mul(2).div(2)), backend="inductor")
    earlier = []
    for _ in range(4):
        found = compiled(ours)
        found[0].zero_()
        found[2].zero_()
        earlier.append(found)
    for first, second, third in earlier:
        assert not first.to_torch().any()
        assert not third.to_torch().any()
        torch.testing.assert_close(second.to_torch(), 2 * x + 1)
    torch.testing.assert_close(ours.to_torch(), x)


def test_what_inductor_cannot_compile_says_so(simulated, monkeypatch):
    def fails(module, inputs):
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(fused, "by_inductor", fails)
    compiled = dtorch.compile(lambda x: (x + 1) * 2, backend="inductor")
    compiled(dtorch.ones(2, device_mesh=MESH))
    with pytest.raises(RemoteError, match=r"inductor cannot compile 2 ops \(aten.add.Tensor, aten.mul.Tensor\)"):
        compiled(dtorch.ones(2, device_mesh=MESH)).to_torch()


def test_a_failure_before_reaches_what_is_compiled(simulated, as_a_graph):
    table = dtorch.ones(2, 2, device_mesh=MESH)
    compiled = dtorch.compile(lambda x: (x + 1) * 2, backend="inductor")
    for _ in range(3):
        compiled(table)
    broken = torch.nn.functional.embedding(dtorch.full((2,), 9, device_mesh=MESH), table)
    with pytest.raises(RemoteError, match="out of range"):
        compiled(broken).to_torch()
    assert compiled(table).to_torch().eq(4).all()


def test_backends_that_are_not_there(monkeypatch):
    with pytest.raises(ValueError, match=r'backend must be None or "inductor", got \'tensorrt\''):
        dtorch.compile(layer, backend="tensorrt")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(
        RuntimeError, match=r"needs a C\+\+ compiler on every worker's machine, and '/nowhere/g\+\+' is not"
    ):
        dtorch.compile(layer, backend="inductor")


def test_what_is_compiled_can_be_compiled_otherwise(simulated):
    plain = dtorch.compile(layer)
    assert dtorch.compile(plain) is plain
    other = dtorch.compile(plain, backend="inductor")
    assert other is not plain
    assert (other.function, other.backend) == (layer, "inductor")
