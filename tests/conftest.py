"""The engines that tests run on: the in-process simulation, and real worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dtorch

ENGINES = ("simulate", "processes")


@pytest.fixture(params=ENGINES, scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """A cluster for the tests of one module, on each engine in turn."""
    dtorch.shutdown()
    dtorch.init(engine=request.param)
    yield request.param
    dtorch.shutdown()


@pytest.fixture(scope="module")
def simulated() -> Iterator[None]:
    """A simulated cluster for the tests of one module."""
    dtorch.shutdown()
    dtorch.init(engine="simulate")
    yield
    dtorch.shutdown()
