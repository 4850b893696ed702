"""The engines that tests run on: the in-process simulation, and real worker processes."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import dtorch

ENGINES = ("simulate", "processes")


def pytest_configure() -> None:
    """A shell starts what it puts in the background with SIGINT ignored, and tests of Ctrl-C would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
