"""Plain tensors placed inside of a function that torch.func transforms: constants are, and of others nothing is lost without an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

import dtorch
from dtorch import DeviceMesh, Shard

pytestmark = pytest.mark.usefixtures("engine")

MESH = DeviceMesh("cpu", [0, 1])
X = torch.arange(8.0).view(2, 4)
ARRAY = numpy.arange(8, dtype=numpy.float32).reshape(2, 4)
W = torch.tensor([1.0, -2.0, 3.0, 0.5])

CONSTANTS: dict[str, Callable[[], Any]] = {
    "from_torch": lambda: dtorch.from_torch(X, MESH, [Shard(0)]),
    "uncommitted": lambda: dtorch.from_torch(X),
    "distribute_tensor": lambda: dtorch.distribute_tensor(X, MESH, [Shard(1)]),
    "from_numpy": lambda: dtorch.from_numpy(ARRAY, MESH),
    "tensor": lambda: dtorch.tensor(X.tolist(), device_mesh=MESH),
    "made inside": lambda: dtorch.from_torch(torch.arange(8.0).view(2, 4), MESH),
}
TRANSFORMS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "grad": grad,
    "vjp": lambda f: lambda w: vjp(f, w)[1](torch.ones(()))[0],
    "jvp": lambda f: lambda w: jvp(f, (w,), (w,))[1],
    "vmap of grad": lambda f: lambda w: vmap(grad(f))(torch.stack([w, 2 * w])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("made", CONSTANTS)
def test_constants(made: str, transform: str) -> None:
    way, make = TRANSFORMS[transform], CONSTANTS[made]
    expected = way(lambda w: (X @ w).sin().sum())(W)
    for w in (W, dtorch.from_torch(W, MESH)):
        found = way(lambda w: (make() @ w).sin().sum())(w)
        torch.testing.assert_close(found.to_torch(), expected)


def test_what_is_detached_is_a_constant() -> None:
    found = grad(lambda w: (dtorch.from_torch(w.detach(), MESH) * w).sum())(W)
    torch.testing.assert_close(found.to_torch(), W)


def _placed(w: torch.Tensor) -> torch.Tensor:
    return dtorch.from_torch(w, MESH).square().sum()


LOST: dict[str, Callable[[], Any]] = {
    "grad": lambda: grad(_placed)(W),
    "computed": lambda: grad(lambda w: _placed(w * 2))(W),
    "uncommitted": lambda: grad(lambda w: dtorch.from_torch(w).square().sum())(W),
    "jvp": lambda: jvp(_placed, (W,), (W,)),
    "vmap": lambda: vmap(_placed)(X),
    "an outer argument": lambda: grad(lambda a: grad(lambda b: _placed(a) * b.sum())(W).sum())(W),
}


@pytest.mark.parametrize("case", LOST)
def test_what_would_be_lost_is_an_error(case: str) -> None:
    with pytest.raises(TypeError, match="cannot be placed; place it before, outside of the function"):
        LOST[case]()


def test_a_tangent_is_not_lost() -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(W, W)
        with pytest.raises(TypeError, match="with a tangent, cannot be placed"):
            dtorch.from_torch(dual, MESH)
