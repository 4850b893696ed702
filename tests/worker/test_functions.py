"""Device functions that create, or write a slice: together the devices hold what torch makes on one."""

from __future__ import annotations

import pytest
import torch

from dtorch.mesh import init_device_mesh
from dtorch.placement import shard
from dtorch.sharding.layout import local_box
from dtorch.worker import functions
from dtorch.worker.registry import Here

CPU = torch.device("cpu")


def places(shape, *counts_and_dims):
    """`Here` of every device of a mesh whose axes shard the given dims, input and output alike."""
    mesh = init_device_mesh("cpu", tuple(n for n, _ in counts_and_dims))
    layout = [([shard(d) for _, d in counts_and_dims], shape)]
    return [Here(mesh, mesh.coordinate(i), CPU, layout, layout) for i in mesh.device_ids]


def cut(tensor, here):
    placements, shape = here.outputs[0]
    box = local_box(placements, here.mesh.shape, here.coordinate, shape)
    return tensor[tuple(slice(*bounds) for bounds in box)]


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 13, 1), (2, 11, 3), (5, 6, 1), (3, 3, 1), (1, 13, 12), (0, 13, 5)]
)
@pytest.mark.parametrize("axes", [[(3, 1)], [(2, 1), (2, 1)], [(2, 0), (3, 1)], [(16, 1)]])
def test_slice_write(start, stop, step, axes):
    whole = torch.zeros(4, 13, 2)
    source = torch.randn(4, len(range(start, stop, step)), 2)
    expected = whole.clone()
    expected[:, start:stop:step] = source
    for here in places(tuple(whole.shape), *axes):
        target = cut(whole, here).clone()
        rows = slice(*here.input_box(0)[0])
        assert functions.slice_write(here, target, source[rows], 1, start, stop, step) == ()
        assert torch.equal(target, cut(expected, here))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("start", "step"), [(0, 1), (5, -2), (0.5, 0.1)])
def test_arange(dtype, start, step):
    if not dtype.is_floating_point:
        start, step = int(start), int(step) or 1
    expected = torch.arange(start, start + step * (99.5 if dtype.is_floating_point else 100), step, dtype=dtype)
    for here in places((100,), (3, 0)):
        assert torch.equal(functions.arange(here, start, step, dtype), cut(expected, here))


def test_linspace_eye_full():
    for here in places((101,), (4, 0)):
        assert torch.equal(functions.linspace(here, -1.0, 2.0, torch.float32), cut(torch.linspace(-1, 2, 101), here))
    for here in places((7, 5), (2, 0), (3, 1)):
        assert torch.equal(functions.eye(here, torch.int32), cut(torch.eye(7, 5, dtype=torch.int32), here))
        assert torch.equal(
            functions.full(here, 2.5, torch.float64), cut(torch.full((7, 5), 2.5, dtype=torch.float64), here)
        )


@pytest.mark.parametrize("diagonal", [-3, 0, 2])
def test_triangles(diagonal):
    whole = torch.randn(3, 7, 5)
    for here in places((3, 7, 5), (2, 1), (3, 2)):
        assert torch.equal(functions.tril(here, cut(whole, here), diagonal), cut(whole.tril(diagonal), here))
        assert torch.equal(functions.triu(here, cut(whole, here), diagonal), cut(whole.triu(diagonal), here))
