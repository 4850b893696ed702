"""Who says how an axis that splits the sequence is used, and that all of it is seen in records; bad input."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, nn

from .compare import SEQUENCE

pytestmark = pytest.mark.usefixtures("simulated")

sdpa = torch.nn.functional.scaled_dot_product_attention


def placed(mesh: DeviceMesh, heads: int = 4, **shape: Any) -> dtorch.Tensor:
    q = torch.randn(1, heads, 12, 8)
    return dtorch.distribute_tensor(q, mesh, [SEQUENCE] * mesh.ndim)


def kinds(call: Any) -> Counter[tuple[str, tuple[str | int, ...]]]:
    with dtorch.record() as r:
        call()
    return Counter((one.kind, one.axes) for one in r.communication)


@pytest.mark.parametrize("name", ["ulysses_cp", "ulysess_cp"])
def test_an_axis_for_ulysses(name: str) -> None:
    """Three redistributions to heads and one back. If there is to be a backward, the log-sum-exp goes back too."""
    x = placed(dtorch.init_device_mesh("cpu", 2, (name,)))
    assert kinds(lambda: sdpa(x, x, x, is_causal=True)) == {("all_to_all", (name,)): 4}
    x.requires_grad_()
    assert kinds(lambda: sdpa(x, x, x, is_causal=True)) == {("all_to_all", (name,)): 5}


def test_an_axis_for_the_ring() -> None:
    """Without a causal mask everything is where it is needed, and only blocks travel: 2 of k and 2 of v past each of 3 devices."""
    x = placed(dtorch.init_device_mesh("cpu", 3, ("ring_cp",)))
    assert kinds(lambda: sdpa(x, x, x)) == {("shift", ("ring_cp",)): 4}
    assert kinds(lambda: sdpa(x, x, x, is_causal=True)) == {("shift", ("ring_cp",)): 4, ("all_to_all", ("ring_cp",)): 4}


def test_both() -> None:
    x = placed(dtorch.init_device_mesh("cpu", (2, 3), ("ulysses_cp", "ring_cp")))
    assert set(kinds(lambda: sdpa(x, x, x))) == {("all_to_all", ("ulysses_cp",)), ("shift", ("ring_cp",))}


def test_other_names_ulysses_where_heads_divide() -> None:
    mesh = dtorch.init_device_mesh("cpu", 3, ("x",))
    assert set(kinds(lambda: sdpa(*[placed(mesh, heads=6)] * 3))) == {("all_to_all", ("x",))}
    assert set(kinds(lambda: sdpa(*[placed(mesh, heads=4)] * 3))) == {("shift", ("x",))}


def test_fewer_heads_than_devices_on_an_axis_named_for_ulysses() -> None:
    """Nobody insisted: it is the ring."""
    x = placed(dtorch.init_device_mesh("cpu", 3, ("ulysses_cp",)), heads=2)
    assert set(kinds(lambda: sdpa(x, x, x))) == {("shift", ("ulysses_cp",))}


def test_an_option_overrides_names() -> None:
    x = placed(dtorch.init_device_mesh("cpu", 2, ("ulysses_cp",)))
    ring, ulysses = nn.SdpaOption(ring_cp_dim="ulysses_cp"), nn.SdpaOption(ulysses_cp_dim="ulysses_cp")

    def in_context() -> None:
        with ring:
            sdpa(x, x, x)

    def nested() -> None:
        with ring, ulysses:
            sdpa(x, x, x)

    call = nn.functional.scaled_dot_product_attention
    expected = sdpa(*[x.to_torch()] * 3)
    assert set(kinds(in_context)) == set(kinds(lambda: call(x, x, x, option=ring))) == {("shift", ("ulysses_cp",))}
    assert set(kinds(nested)) == set(kinds(lambda: call(x, x, x))) == {("all_to_all", ("ulysses_cp",))}
    torch.testing.assert_close(call(x, x, x, option=ring).to_torch(), expected)
    torch.testing.assert_close(call(*[x.to_torch()] * 3, option=ring), expected)


def test_an_option_for_an_axis_that_is_not_there_is_not_parallel() -> None:
    x = placed(dtorch.init_device_mesh("cpu", 2, ("ulysses_cp",)))
    option = nn.SdpaOption(ulysses_cp_dim="other", ring_cp_dim="another")
    found = kinds(lambda: nn.functional.scaled_dot_product_attention(x, x, x, option=option))
    assert set(found) == {("all_to_all", ("ulysses_cp",))}


def test_bad_options() -> None:
    with pytest.raises(TypeError, match="ring_cp_dim must be the name of a mesh axis or None, got 1"):
        nn.SdpaOption(ring_cp_dim=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both 'cp'; one axis can do one of them"):
        nn.SdpaOption(ulysses_cp_dim="cp", ring_cp_dim="cp")
    x = placed(dtorch.init_device_mesh("cpu", 2, ("cp",)))
    with pytest.raises(TypeError, match="option must be an SdpaOption or None, got 'ring'"):
        nn.functional.scaled_dot_product_attention(x, x, x, option="ring")  # type: ignore[arg-type]


def test_heads_that_cannot_be_split_where_the_user_insists() -> None:
    x = placed(dtorch.init_device_mesh("cpu", 4, ("cp",)), heads=3)
    with (
        nn.SdpaOption(ulysses_cp_dim="cp"),
        pytest.raises(
            ValueError, match=r"SdpaOption\(ulysses_cp_dim='cp'\) splits the heads over 4 devices.*has 3 heads"
        ),
    ):
        sdpa(x, x, x)


ILLEGAL: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "dropout": ((1, 4, 12, 8), (1, 4, 12, 8), {"dropout_p": 1.5}),
    "mask shape": ((1, 4, 12, 8), (1, 4, 12, 8), {"attn_mask": torch.ones(11, 12, dtype=torch.bool)}),
    "mask type": ((1, 4, 12, 8), (1, 4, 12, 8), {"attn_mask": torch.ones(12, 12, dtype=torch.float64)}),
    "features": ((1, 4, 12, 8), (1, 4, 12, 6), {}),
    "heads": ((1, 4, 12, 8), (1, 2, 12, 8), {}),
    "groups": ((1, 4, 12, 8), (1, 3, 12, 8), {"enable_gqa": True}),
    # torch's fused kernel, which alone takes both, takes a mask of 2 or 4 dims.
    "causal beside a mask of 3 dims": (
        (1, 4, 12, 8),
        (1, 4, 12, 8),
        {"attn_mask": torch.ones(4, 12, 12, dtype=torch.bool), "is_causal": True},
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_what_is_illegal_is_torchs_own_error(case: str) -> None:
    query, key, options = ILLEGAL[case]
    mesh = dtorch.init_device_mesh("cpu", 2, ("ring_cp",))
    q, k = torch.randn(query), torch.randn(key)
    x, y = (dtorch.distribute_tensor(t, mesh, [SEQUENCE]) for t in (q, k))
    with pytest.raises((RuntimeError, ValueError)) as expected:
        sdpa(q, k, k, **options)
    with pytest.raises(expected.type) as actual:
        sdpa(x, y, y, **options)
    assert str(actual.value) == str(expected.value)


def test_a_causal_mask_beside_another_needs_features_in_a_row() -> None:
    """As torch's fused kernel does."""
    mesh = dtorch.init_device_mesh("cpu", 2, ("ring_cp",))
    q = torch.randn(1, 4, 8, 12).mT
    x = dtorch.distribute_tensor(q, mesh, [SEQUENCE])
    for one in (q, x):
        with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
            sdpa(one, one, one, attn_mask=torch.ones(12, 12, dtype=torch.bool), is_causal=True)


def test_meshes_that_differ() -> None:
    x = placed(DeviceMesh("cpu", [0, 1], ("ring_cp",)))
    y = placed(DeviceMesh("cpu", [2, 3], ("ring_cp",)))
    with pytest.raises(dtorch.errors.MeshMismatch, match="different meshes"):
        sdpa(x, y, y)


def test_what_nobody_asked_for_is_implicit() -> None:
    named = placed(dtorch.init_device_mesh("cpu", 2, ("ring_cp",)))
    other = placed(dtorch.init_device_mesh("cpu", 2, ("x",)))
    with dtorch.set_implicit_communication("error"):
        sdpa(named, named, named)
        with nn.SdpaOption(ring_cp_dim="x"):
            sdpa(other, other, other)
        with pytest.raises(dtorch.errors.ImplicitCommunication, match="scaled_dot_product_attention needs"):
            sdpa(other, other, other)


def test_without_a_split_sequence_it_stays_torchs() -> None:
    """Heads and batch need no communication, nor do queries that are split before whole keys."""
    mesh = dtorch.init_device_mesh("cpu", 2, ("ring_cp",))
    q = torch.randn(2, 4, 12, 8)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = dtorch.distribute_tensor(q, mesh, [placement])
        assert not kinds(lambda x=x: sdpa(x, x, x, is_causal=True))
    x, y = (dtorch.distribute_tensor(q, mesh, [p]) for p in (SEQUENCE, Replicate()))
    assert not kinds(lambda: sdpa(x, y, y))


def test_a_cache_begins_empty() -> None:
    """Libraries put keys behind those of earlier calls, of which there are none at first: that keeps the split, and moves nothing."""
    x = placed(dtorch.init_device_mesh("cpu", 3, ("ring_cp",)))
    for nothing in (torch.empty(0), torch.empty(1, 4, 0, 8)):
        keys = torch.cat([dtorch.distribute_tensor(nothing, x.device_mesh, [Replicate()]), x], -2)
        assert keys.placements == [SEQUENCE]
        assert not kinds(lambda nothing=nothing: torch.cat([nothing, x], -2))
        torch.testing.assert_close(sdpa(x, keys, keys).to_torch(), sdpa(*[x.to_torch()] * 3))
