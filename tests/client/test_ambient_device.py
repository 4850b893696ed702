"""``torch.device(...)`` as a context, and a default device or dtype, are the user's: they do not reach into dtorch's own work."""

from __future__ import annotations

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Partial, Replicate, Shard

pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("size", [3, 400])
def test_placing_computing_and_reading_under_another_device(placement: object, size: int) -> None:
    plain = torch.randn(size, size)
    with torch.device("meta"):
        x = dtorch.from_torch(plain, DeviceMesh("cpu", [0, 1]), [placement])
        shards = x.local_shards()
        got, doubled, text = x.to_torch(), (x + x).to_torch(), repr(x)
        noise = torch.rand_like(x).to_torch()
    assert got.device.type == doubled.device.type == noise.device.type == "cpu"
    assert all(shard.device.type == "cpu" for shard in shards.values())
    torch.testing.assert_close(got, plain)
    torch.testing.assert_close(doubled, 2 * plain)
    assert text == repr(x)


def test_a_default_dtype_is_followed_where_torch_follows_it() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert dtorch.rand(2, device_mesh=mesh).dtype == torch.float64
        assert dtorch.from_torch(torch.ones(2, dtype=torch.float32), mesh).dtype == torch.float32
        assert (dtorch.arange(4, device_mesh=mesh) / 2).to_torch().dtype == torch.float64
        assert dtorch.arange(4, device_mesh=mesh).float().mean().to_torch().dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
    assert (dtorch.arange(4, device_mesh=mesh) / 2).to_torch().dtype == before
    assert torch.sqrt(dtorch.arange(4, device_mesh=mesh)).to_torch().dtype == before
