"""Clusters of real processes for tests in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dtorch


@pytest.fixture
def mesh() -> Iterator[dtorch.DeviceMesh]:
    """Two workers of a fresh cluster, running when the test begins."""
    dtorch.shutdown()
    dtorch.init(engine="processes")
    made = dtorch.DeviceMesh("cpu", [0, 1])
    dtorch.ones(2, device_mesh=made).to_torch()
    yield made
    dtorch.shutdown()
