"""Few queries before many split keys, as in decoding with a split cache: the queries go to the keys, and not the keys to the queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard, nn

from .compare import BATCH, HEADS, MESHES, SEQUENCE, compare

pytestmark = pytest.mark.usefixtures("simulated")

sdpa = torch.nn.functional.scaled_dot_product_attention
MASK = torch.rand(2, 1, 1, 37, generator=torch.Generator().manual_seed(3)) > 0.3

CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "grouped": {"kv_heads": 2},
    "scale": {"scale": 0.3},
    "boolean mask": {"mask": MASK},
    "float mask": {"mask": torch.randn(1, 4, 1, 37, generator=torch.Generator().manual_seed(4))},
    "values of another size": {"features": (8, 5)},
    "bfloat16": {"kv_heads": 2, "dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
    "causal": {"queries": 3, "is_causal": True},
    "dropout": {"dropout_p": 0.5},
    "fewer keys than devices": {"keys": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", ["ring", "both", "ring first", "dp tp ring", "idle axes", "no names"])
def test_values(mesh: str, case: str) -> None:
    """And all gradients, for queries that each device of the sequence has, and for ones that are split like the keys."""
    options = {"queries": 1, "keys": 37, **CASES[case]}
    on, where = MESHES[mesh]
    whole = [Replicate() if p == SEQUENCE else p for p in where]
    if "dropout_p" in options:
        dtorch.shutdown()
        dtorch.init(engine="simulate", random="torch")
    compare(on, whole, key_placements=where, **options)
    if case in ("one query", "causal"):
        compare(on, where, **options)
    if "dropout_p" in options:
        dtorch.shutdown()
        dtorch.init(engine="simulate")


@pytest.mark.parametrize("where", [[Replicate(), BATCH], [HEADS, SEQUENCE], [Shard(3), BATCH], [BATCH, HEADS]])
def test_queries_that_lie_otherwise(where: list[Any]) -> None:
    on, placements = MESHES["both"]
    for queries in (1, 5):
        compare(on, where, key_placements=placements, queries=queries, keys=64)


def placed(mesh: Any, queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    q, k = torch.randn(1, 4, queries, 8, dtype=dtype), torch.randn(1, 2, keys, 8, dtype=dtype)
    return [dtorch.distribute_tensor(t, mesh, p) for t, p in ((q, [Replicate()]), (k, [SEQUENCE]), (k, [SEQUENCE]))]


@pytest.mark.parametrize("name", ["ring_cp", "ulysses_cp", "x"])
def test_bytes(name: str) -> None:
    """An output and a log-sum-exp in float32 from each of the others; nothing that grows with the keys."""
    mesh = dtorch.init_device_mesh("cpu", 4, (name,))
    for keys in (64, 640):
        with dtorch.record() as r:
            out = sdpa(*placed(mesh, 1, keys, torch.bfloat16), enable_gqa=True)
        assert out.placements == [Replicate()]
        assert [(one.kind, one.axes, one.nbytes) for one in r.communication] == [
            ("all_gather", (name,), 3 * 4 * (8 + 1) * 4)
        ]


def test_many_queries_stay() -> None:
    mesh = dtorch.init_device_mesh("cpu", 4, ("ring_cp",))
    with dtorch.record() as r:
        sdpa(*placed(mesh, 64, 64), enable_gqa=True)
    assert "shift" in {one.kind for one in r.communication}


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_as_many_queries_as_keys_go_round_both_ways(kv_heads: int) -> None:
    """No device gets the whole of a sequence, queries and their gradients included."""
    mesh = dtorch.init_device_mesh("cpu", 4, ("ring_cp",))
    given = [
        dtorch.distribute_tensor(torch.randn(1, heads, 64, 8), mesh, [SEQUENCE]).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    with dtorch.record() as r:
        out = sdpa(*given, enable_gqa=True)
        torch.autograd.grad(out, given, torch.ones_like(out))
    assert {one.kind for one in r.communication} == {"shift"}


def test_where_somebody_insists_on_ulysses_it_is_that() -> None:
    mesh = dtorch.init_device_mesh("cpu", 2, ("x",))
    with nn.SdpaOption(ulysses_cp_dim="x"), dtorch.record() as r:
        sdpa(*placed(mesh, 1, 64), enable_gqa=True)
    assert max(one.nbytes for one in r.communication) >= 64 * 8 * 4 // 2


def test_it_is_implicit_unless_a_name_asks_for_it() -> None:
    named, other = (placed(dtorch.init_device_mesh("cpu", 2, (name,)), 1, 64) for name in ("ring_cp", "x"))
    with dtorch.set_implicit_communication("error"):
        sdpa(*named, enable_gqa=True)
        with pytest.raises(dtorch.errors.ImplicitCommunication, match="scaled_dot_product_attention needs"):
            sdpa(*other, enable_gqa=True)


def test_a_longer_cache_needs_no_new_program() -> None:
    from dtorch.client import runtime

    mesh = dtorch.init_device_mesh("cpu", 2, ("ring_cp",))
    sdpa(*placed(mesh, 1, 64), enable_gqa=True)
    before = len(runtime.controller().programs)
    sdpa(*placed(mesh, 1, 65), enable_gqa=True)
    assert len(runtime.controller().programs) == before
