"""Every op, module and optimizer, each on one mesh and under one layout chosen by its name: what `make conformance` does
over the whole grid. Failures must be those of known.toml, and those only."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest

from . import adapters, databases, known, memory, told
from .checks import Grid
from .outcome import Outcome
from .placements import MESHES, VARIANTS

pytestmark = pytest.mark.filterwarnings("ignore")  # the databases call deprecated things on purpose

PARTS = 24
NOT_FOR_ALL = ("partial", "mixed", "plain")
"""Layouts that factories, modules and some in-place calls do without: then the first dim is sharded instead."""
CHECKS = ("forward", "backward", "inplace", "inplace_backward", "out")

ON_PROCESSES = (
    *(
        "add",
        "mm",
        "bmm",
        "sum",
        "softmax_with_dtype",
        "cumsum",
        "sort",
        "cat",
        "split",
        "transpose",
        "index_select",
        "gather",
    ),
    *(
        "nonzero",
        "where",
        "tril",
        "linalg_qr",
        "nn_functional_layer_norm",
        "nn_functional_embedding",
        "nn_functional_conv2d",
    ),
    *("nn.Linear", "nn.TransformerEncoderLayer", "optim.SGD", "optim.AdamW"),
)
"""A slice across the families: the engine does not change what an op means, only how it is run."""

SHARING = (
    *(
        "contiguous",
        "to",
        "reshape",
        "reshape_as",
        "flatten",
        "ravel",
        "expand",
        "expand_as",
        "broadcast_to",
    ),
    *("squeeze", "unsqueeze", "narrow", "unflatten", "chunk", "split", "tensor_split", "unbind", "movedim"),
    *("diagonal", "real", "view_as", "resolve_conj", "resolve_neg", "positive", "atleast_2d", "permute", "select", "T"),
    *("nn_functional_dropout", "nn_functional_feature_alpha_dropout_without_train", "nn_functional_pad_constant"),
    *("nan_to_num", "cat", "clone", "repeat_interleave", "nn_functional_interpolate_nearest", "float", "__getitem__"),
)
"""Ops of which some give their argument, or a view of it, always or sometimes."""


@pytest.fixture(scope="module")
def simulation() -> Iterator[adapters.Adapter]:
    yield from running("simulate")


@pytest.fixture(scope="module")
def processes() -> Iterator[adapters.Adapter]:
    yield from running("processes")


def running(engine: str) -> Iterator[adapters.Adapter]:
    import dtorch

    dtorch.shutdown()
    yield adapters.make(engine)
    dtorch.shutdown()


def spread(name: str) -> Grid:
    """The mesh and the layout under which ``name`` is tried."""
    number = zlib.crc32(name.encode())
    meshes = [mesh for mesh in MESHES if mesh != "1"]
    variant = VARIANTS[number // 7 % len(VARIANTS)]
    variants = (variant, "first") if variant in NOT_FOR_ALL or name.startswith("optim.") else (variant,)
    return Grid((meshes[number % len(meshes)],), variants, CHECKS, 1)


def report(outcomes: list[Outcome]) -> str:
    return "\n".join(f"{found.status}: {found.where()}: {found.detail}" for found in outcomes)


@pytest.mark.parametrize("part", range(PARTS))
def test_simulated(simulation: adapters.Adapter, part: int) -> None:
    listed = known.load()
    found, untold = [], []
    for entry in databases.select(("*",), part, PARTS):
        with told.watching() as more:
            found += entry.run(simulation, spread(entry.name))
        untold += [f"{entry.name}: {one}" for one in more]
    assert found
    failures = known.unexpected(found, listed)
    assert not failures, report(failures)
    assert not untold


@pytest.mark.parametrize("name", ON_PROCESSES)
def test_on_workers(processes: adapters.Adapter, name: str) -> None:
    grid = Grid(("2",), ("first",), ("forward", "backward"), 1)
    found = [one for entry in databases.select((name,)) for one in entry.run(processes, grid)]
    failures = known.unexpected(found, known.load())
    assert not failures, report(failures)


@pytest.mark.parametrize("name", SHARING)
def test_memory_is_shared_where_torch_shares_it(simulation: adapters.Adapter, name: str) -> None:
    """Of every op: ``python -m tests.conformance --checks alias,alias_no_grad,alias_inference``."""
    grid = Grid(("2",), ("first",), tuple(memory.MODES), 1)
    found = [one for entry in databases.select((name,)) for one in entry.run(simulation, grid)]
    assert any(one.status == "ok" for one in found)
    failures = known.unexpected(found, known.load())
    assert not failures, report(failures)


@pytest.mark.parametrize("name", sorted(known.load()))
def test_known_failures_still_fail(simulation: adapters.Adapter, name: str) -> None:
    grid = Grid(("2", "2x2"), VARIANTS, (*CHECKS, "inference", "gradgrad"), 2, ("all",))
    found = [one for entry in databases.select((name,)) for one in entry.run(simulation, grid)]
    assert any(one.status in ("wrong", "raised") for one in found), f"{name} works now: take it out of known.toml"
