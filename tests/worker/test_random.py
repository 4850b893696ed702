"""Random values depend on the key and on an element's place in the whole tensor, on nothing else; and they are random."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtorch.mesh import init_device_mesh
from dtorch.placement import REPLICATE, shard
from dtorch.worker import random
from dtorch.worker.registry import DEVICE_FUNCTIONS, Here

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CALLS = {
    "dtorch.uniform": (-1.0, 3.0),
    "dtorch.normal": (1.0, 2.0),
    "dtorch.log_normal": (0.0, 0.5),
    "dtorch.bernoulli": (0.3,),
    "dtorch.exponential": (1.5,),
    "dtorch.geometric": (0.2,),
    "dtorch.cauchy": (0.0, 1.0),
    "dtorch.random_integers": (-5, 17),
}


def part(name, arguments, shape, mesh, placements, coordinate, dtype, key=7):
    here = Here(mesh, coordinate, CPU, (), [(placements, shape)])
    return DEVICE_FUNCTIONS[name](here, key, *arguments, dtype)


def whole(name, arguments, shape, dtype=torch.float32, key=7):
    mesh = init_device_mesh("cpu", 1)
    return part(name, arguments, shape, mesh, [REPLICATE], (0,), dtype, key)


def put_together(tensors, mesh, placements):
    """The inverse of a split: concatenate along the last axis first."""
    for axis in reversed(range(mesh.ndim)):
        groups = {}
        for coordinate, tensor in sorted(tensors.items()):
            groups.setdefault(coordinate[:axis], []).append(tensor)
        placement = placements[axis]
        tensors = {c: torch.cat(g, placement.dim) if placement.is_shard() else g[0] for c, g in groups.items()}
    return tensors[()]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("placements", [(0, -1), (1, -1), (0, 1), (1, 1), (2, 0)])
def test_any_split_gives_the_same_bits(name, dtype, placements):
    mesh = init_device_mesh("cpu", (3, 2))
    placements = [REPLICATE if p < 0 else shard(p) for p in placements]
    shape = (7, 5, 9)
    parts = {
        c: part(name, CALLS[name], shape, mesh, placements, c, dtype)
        for c in itertools.product(*map(range, mesh.shape))
    }
    assert torch.equal(put_together(parts, mesh, placements), whole(name, CALLS[name], shape, dtype))


@pytest.mark.parametrize("name", ["dtorch.uniform", "dtorch.normal"])
def test_complex_values_split_too(name):
    mesh = init_device_mesh("cpu", 3)
    parts = {(i,): part(name, CALLS[name], (5, 4), mesh, [shard(1)], (i,), torch.complex64) for i in range(3)}
    assert torch.equal(put_together(parts, mesh, [shard(1)]), whole(name, CALLS[name], (5, 4), torch.complex64))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_box_of_words(data):
    shape = data.draw(st.lists(st.integers(1, 40), min_size=0, max_size=4))
    each = data.draw(st.integers(1, 2))
    box = []
    for size in shape:
        start = data.draw(st.integers(0, size))
        box.append((start, data.draw(st.integers(start, size))))
    random_limits = data.draw(st.sampled_from([(1200, 1 << 20), (0, 64), (10, 500)]))
    old = random._START_COST, random._MOST_WORDS
    try:
        random._START_COST, random._MOST_WORDS = random_limits
        found = random.words(3, shape, box, each)
    finally:
        random._START_COST, random._MOST_WORDS = old
    expected = random._Stream(3).run(0, math.prod(shape) * each).reshape([*shape, each])
    assert (found == expected[tuple(slice(*bounds) for bounds in box)]).all()


def test_long_tensors_are_made_in_parts():
    n = (1 << 20) * 2 + 17
    assert (random.words(3, (n,), ((5, n),))[-3:, 0] == random._Stream(3).run(n - 3, 3)).all()


def test_a_thin_slice_of_a_large_tensor_is_cheap():
    """A column of 4 G elements: a word each, not the rows between."""
    shape = (100, 40_000_000)
    found = random.words(3, shape, ((0, 100), (7, 8)))
    assert found[99, 0, 0] == random._Stream(3).run(99 * shape[1] + 7, 1)[0]


# Distributions, at a million values: five standard errors.

N = 1_000_000


def cdf_distance(values, cdf):
    """Kolmogorov and Smirnov's statistic."""
    ordered = values.double().flatten().sort().values
    expected = cdf(ordered)
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return (steps - expected).abs().max().item()


CDFS = {
    "dtorch.uniform": lambda x: (x + 1) / 4,
    "dtorch.normal": lambda x: torch.special.ndtr((x - 1) / 2),
    "dtorch.log_normal": lambda x: torch.special.ndtr(x.log() / 0.5),
    "dtorch.exponential": lambda x: 1 - torch.exp(-1.5 * x),
    "dtorch.cauchy": lambda x: 0.5 + torch.atan(x) / math.pi,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CDFS)
def test_distribution(name, dtype):
    assert cdf_distance(whole(name, CALLS[name], (N,), dtype), CDFS[name]) < 1.95 / math.sqrt(N)  # p = 0.001


def test_moments():
    x = whole("dtorch.normal", (0.0, 1.0), (1000, 1000)).double()
    assert abs(x.mean()) < 5 / 1000
    assert abs(x.var() - 1) < 5 * math.sqrt(2) / 1000
    assert abs((x[:, 1:] * x[:, :-1]).mean()) < 5 / 1000
    assert x.abs().max() < 6.7
    b = whole("dtorch.bernoulli", (0.3,), (N,)).double()
    assert set(b.unique().tolist()) == {0.0, 1.0}
    assert abs(b.mean() - 0.3) < 5 * 0.46 / 1000
    g = whole("dtorch.geometric", (0.2,), (N,)).double()
    assert g.min() == 1
    assert abs(g.mean() - 5) < 5 * math.sqrt(20) / 1000
    counts = torch.bincount(whole("dtorch.random_integers", (0, 10), (N,), torch.int64), minlength=10)
    assert ((counts - N / 10).abs() < 5 * math.sqrt(N * 0.09)).all()


def test_keys_differ():
    a, b = (whole("dtorch.normal", (0.0, 1.0), (N,), key=key).double() for key in (1, 2))
    assert abs((a * b).mean()) < 5 / 1000
    assert not torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_never_reaches_its_end(dtype):
    x = whole("dtorch.uniform", (0.0, 1.0), (N,), dtype)
    assert x.min() >= 0
    assert x.max() < 1
    x = whole("dtorch.uniform", (1e4, 1e4 + 1), (N,), dtype)  # a range that rounds away
    assert x.min() >= torch.tensor(1e4, dtype=dtype)


def test_integers_of_every_dtype_have_torchs_range():
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.bool):
        x = whole("dtorch.random_integers", (None, None), (N,), dtype)
        y = torch.empty(N, dtype=dtype).random_()
        assert x.dtype == dtype
        assert (x.max(), x.min()) == (y.max(), y.min())
    x = whole("dtorch.random_integers", (-(2**63), 2**63), (N,), torch.int64)
    assert x.min() < -(2**62)
    assert x.max() > 2**62
    x = whole("dtorch.random_integers", (None, None), (N,), torch.bfloat16)
    assert (x.min(), x.max()) == (0, 256)


def test_a_tensor_of_probabilities():
    mesh = init_device_mesh("cpu", 2)
    p = torch.linspace(0, 1, 10).repeat(1000, 1)
    parts = {}
    for i, piece in enumerate(p.chunk(2, 1)):
        here = Here(mesh, (i,), CPU, (), [([shard(1)], p.shape)])
        parts[(i,)] = random.bernoulli(here, 7, piece, torch.float32)
    found = put_together(parts, mesh, [shard(1)])
    assert torch.equal(
        found, random.bernoulli(Here(mesh, (0,), CPU, (), [([REPLICATE], p.shape)]), 7, p, torch.float32)
    )
    assert (found.mean(0) - p[0]).abs().max() < 5 * 0.5 / math.sqrt(1000)


def test_randperm():
    mesh = init_device_mesh("cpu", 3)
    parts = {(i,): part("dtorch.randperm", (), (100,), mesh, [shard(0)], (i,), torch.int64) for i in range(3)}
    found = put_together(parts, mesh, [shard(0)])
    assert torch.equal(found.sort().values, torch.arange(100))
    assert not torch.equal(found, torch.arange(100))


def test_seeded_runs_any_op_that_takes_a_generator():
    here = Here(init_device_mesh("cpu", 1), (0,), CPU)
    weights = torch.tensor([0.0, 1.0, 1.0])
    state = torch.get_rng_state()
    a, b = (random.seeded(here, 5, "aten.multinomial.default", weights, 100, True) for _ in range(2))
    assert torch.equal(a, b)
    assert set(a.tolist()) == {1, 2}
    assert torch.equal(state, torch.get_rng_state())
