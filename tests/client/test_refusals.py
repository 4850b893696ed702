"""What needs memory in this process or a trace of it is refused with a word on what to do instead; plain tensors go on as before."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch

from .same import every_engine, place

pytestmark = every_engine

TRACED = "dtorch.compile runs a function or module with one command to the workers"

CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compile": (lambda x: torch.compile(lambda a: a + 1)(x), TRACED),
    "compile a closure": (lambda x: torch.compile(lambda: x + 1)(), TRACED),
    "compile, fullgraph": (lambda x: torch.compile(lambda a: a + 1, fullgraph=True, backend="eager")(x), TRACED),
    "export": (lambda x: torch.export.export(torch.nn.ReLU(), (x,)), TRACED),
    "export, not strict": (lambda x: torch.export.export(torch.nn.ReLU(), (x,), strict=False), TRACED),
    "linearize": (lambda x: torch.func.linearize(torch.exp, x), r"torch\.func\.jvp"),
    "from_dlpack": (torch.from_dlpack, r"x\.to_torch\(\)"),
    "to_dlpack": (torch.utils.dlpack.to_dlpack, r"x\.to_torch\(\)"),
    "data_ptr": (lambda x: x.data_ptr(), r"x\.to_torch\(\)"),
    "storage": (lambda x: x.storage(), r"x\.to_torch\(\)"),
    "storage_offset of a view": (lambda x: x[1:].storage_offset(), "index the base"),
    "save in torch's old format": (
        lambda x: torch.save({"x": [x]}, io.BytesIO(), _use_new_zipfile_serialization=False),
        "uninitialised memory",
    ),
    "share_memory_": (lambda x: x.share_memory_(), "pickle"),
    "pin_memory": (lambda x: x.pin_memory(), "workers already"),
    "is_set_to": (lambda x: x.is_set_to(x), "compare"),
    "resize_": (lambda x: x.resize_(2, 2), "make a new one"),
    "set_": (lambda x: x.set_(), "no storage"),
    "set_ to a storage": (lambda x: x.set_(x.untyped_storage()), "no storage"),
    "as_strided around a view": (lambda x: x[1:].as_strided((2,), (1,), 0), "the tensor it is a view of"),
    "as_strided between the rows of a view": (
        lambda x: x[:, 1:].as_strided((2, 2), (6, 2)),
        "the tensor it is a view of",
    ),
    "to_sparse": (lambda x: x.to_sparse(), "dense"),
    "to_mkldnn": (lambda x: x.to_mkldnn(), "dense tensors only"),
    "quantize": (lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8), "quantised"),
    "nested": (lambda x: torch.nested.nested_tensor([x]), "dense tensors only"),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_with_advice(name: str) -> None:
    call, advice = CALLS[name]
    with pytest.raises(Exception, match=advice):
        call(place(torch.ones(4, 6), "first"))


def test_plain_tensors_compile_though_dtorch_is_imported() -> None:
    x = torch.randn(3)
    assert torch.equal(torch.compile(lambda a: a + 1, backend="eager")(x), x + 1)
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)), x)


def test_tracing_by_jit_and_fx_works() -> None:
    x = torch.randn(4, 3)
    ours = dtorch.distribute_tensor(x, dtorch.DeviceMesh("cpu", [0, 1]), [dtorch.Shard(0)])
    assert torch.equal(torch.jit.trace(lambda a: a.relu() + 1, (ours,))(ours).to_torch(), x.relu() + 1)
    assert torch.equal(torch.fx.symbolic_trace(torch.nn.ReLU())(ours).to_torch(), x.relu())


def test_where_a_tensor_begins_in_its_storage() -> None:
    x = place(torch.ones(4, 6), "first")
    assert (x.storage_offset(), x.t().storage_offset(), (x + x).storage_offset()) == (0, 0, 0)
    assert torch.zeros(4, 6, device=x.device)[1:, 2:].storage_offset() == 8
