"""Placements are chosen by bytes moved; what is written in place stays where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtorch.mesh import DeviceMesh
from dtorch.placement import PARTIAL, REPLICATE, PlacementList, shard
from dtorch.sharding.choose import Decision, choose
from dtorch.sharding.shapes import infer
from dtorch.sharding.spec import Spec
from dtorch.sharding.strategy import Call, TensorArg

aten = torch.ops.aten
MESH = DeviceMesh("cpu", [0, 1])
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]])
R, P, S0, S1, S2 = REPLICATE, PARTIAL, shard(0), shard(1), shard(2)


def decide(op: Any, *args: Any, keep: Any = (), mesh: DeviceMesh = MESH, **kwargs: Any) -> Decision:
    """Each tensor as (shape, placements)."""
    specs: list[Spec] = []

    def arg(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], tuple):
            placements = PlacementList(value[1] if isinstance(value[1], tuple) else (value[1],))
            specs.append(Spec.of(mesh, placements, value[0], None, torch.float32))
            spec = specs[-1]
            return TensorArg(len(specs) - 1, tuple(spec.shape), spec.stride, spec.dtype)
        return [arg(v) for v in value] if isinstance(value, list) else value

    passed = tuple(map(arg, args))
    outputs = tuple(None if o is None else TensorArg(i, *o) for i, o in enumerate(infer(op, passed, kwargs)))
    inputs = tuple(TensorArg(i, tuple(s.shape), s.stride, s.dtype) for i, s in enumerate(specs))
    return choose(Call(op, passed, kwargs, inputs, outputs), specs, keep)


@pytest.mark.parametrize(("a", "b", "out"), [(S0, R, S0), (R, S1, S1), (S1, S0, P), (R, R, R)])
def test_matrix_products_that_move_nothing(a, b, out) -> None:
    found = decide(aten.mm.default, ((512, 512), a), ((512, 512), b))
    assert found.inputs == ([a], [b])
    assert found.outputs == ([out],)
    assert not found.gathered


def test_a_pending_factor_is_completed() -> None:
    """(2 - 1) * inf is not 2 * inf - 1 * inf."""
    assert decide(aten.mm.default, ((512, 512), P), ((512, 512), R)).inputs != ([P], [R])
    assert decide(aten.mul.Tensor, ((512, 512), P), ((512, 512), R)).outputs != ([P],)


@pytest.mark.parametrize(("op", "number", "passes"), [
    (aten.mul.Tensor, 0.5, True), (aten.mul.Tensor, 3, False), (aten.mul.Tensor, float("inf"), False),
    (aten.div.Tensor, 0.5, False), (aten.div.Tensor, 3, True), (aten.div.Tensor, 0, False),
])  # fmt: skip
def test_pending_sums_are_only_scaled_down(op, number, passes) -> None:
    assert (decide(op, ((512, 512), P), number).outputs == ([P],)) == passes


def test_a_two_layer_perceptron_needs_one_reduction() -> None:
    up = decide(aten.addmm.default, ((4096,), S0), ((128, 1024), R), ((1024, 4096), S1))
    assert up.outputs == ([S1],)
    assert up.inputs == ([S0], [R], [S1])
    act = decide(aten.gelu.default, ((128, 4096), S1))
    assert act.outputs == ([S1],)
    down = decide(aten.mm.default, ((128, 4096), S1), ((4096, 1024), S0))
    assert down.outputs == ([P],)
    residual = decide(aten.add.Tensor, ((128, 1024), R), ((128, 1024), P))
    assert residual.outputs == ([P],)


def test_data_parallel_gradients_are_pending() -> None:
    found = decide(aten.mm.default, ((1024, 512), S1), ((512, 256), S0))
    assert found.outputs == ([P],)


def test_fully_sharded_weights_are_gathered_for_a_large_batch() -> None:
    found = decide(aten.mm.default, ((65536, 512), S0), ((512, 512), S0))
    assert found.inputs == ([S0], [R])
    assert found.outputs == ([S0],)


def test_small_pending_sums_are_completed_at_once() -> None:
    assert decide(aten.relu.default, ((4, 8), P)).inputs == ([R],)
    assert decide(aten.relu.default, ((4096, 4096), P)).inputs == ([S0],)


def test_no_dim_is_sharded_into_nothing() -> None:
    assert decide(aten.relu.default, ((1, 4096 * 4096), P)).inputs == ([S1],)


def test_a_written_tensor_keeps_its_placements() -> None:
    found = decide(aten.add_.Tensor, ((64, 64), S1), ((64, 64), S0), keep={0})
    assert found.inputs == ([S1], [S1])
    assert found.outputs == ([S1],)
    assert not found.keep_failed
    found = decide(aten.mul_.Tensor, ((64, 64), R), ((64, 64), P), keep={0})
    assert found.inputs == ([R], [R])
    assert not found.keep_failed
    found = decide(aten.relu_.default, ((64, 64), P), keep={0})
    assert found.keep_failed
    assert found.inputs in (([R],), ([S0],))
    found = decide(aten.cumsum_.default, ((64, 64), S0), 0, keep={0})
    assert found.keep_failed


def test_ops_without_a_rule_are_gathered() -> None:
    found = decide(aten.linalg_inv_ex.default, ((8, 8), S0))
    assert found.gathered
    assert found.inputs == ([R],)
    assert not decide(aten.linalg_inv_ex.default, ((8, 8), R)).gathered


def test_views_need_even_parts_over_all_axes() -> None:
    split = decide(aten.view.default, ((8, 24), (S1, S1)), [8, 4, 6], mesh=GRID)
    assert split.outputs == ([S1, S1],)
    assert not split.gathered
    uneven = decide(aten.view.default, ((8, 12), (S1, S1)), [8, 2, 6], mesh=GRID)
    assert uneven.outputs[0].count(S1) == 1
    # Nine in three and three cannot stay in two parts: the other dim takes over, for half of what gathering costs, or all is gathered
    # where that is little.
    assert decide(aten.view.default, ((1 << 16, 9), S1), [1 << 16, 3, 3]).outputs[0] == [S0]
    assert decide(aten.view.default, ((8, 9), S1), [8, 3, 3]).outputs[0] == [R]


def test_heads_stay_where_they_are() -> None:
    heads = ((2, 8, 128, 64), S1)
    found = decide(aten._scaled_dot_product_flash_attention_for_cpu.default, heads, heads, heads, 0.0, True)
    assert found.outputs == ([S1], [S1])


def test_each_index_of_a_list_is_on_its_own() -> None:
    found = decide(
        aten._foreach_add_.List,
        [((64, 64), S0), ((64,), R), ((8, 8), S1)],
        [((64, 64), S0), ((64,), P), ((8, 8), S0)],
        keep={0, 1, 2},
    )
    assert found.inputs == ([S0], [R], [S1], [S0], [R], [S1])
    assert not found.keep_failed
    norms = decide(aten._foreach_norm.Scalar, [((64, 64), S0), ((64,), R)], 2)
    assert norms.outputs == ([P], [R])
    assert norms.finish is not None


def test_mean_over_the_sharded_dim_counts_the_whole() -> None:
    found = decide(aten.mean.dim, ((1000, 512), S0), [0, 1])
    assert found.outputs == ([P],)
    assert found.local == "dtorch.mean"
