"""With ``init(random="torch")`` every random op gives single-device torch's own values, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtorch

from ..conftest import ENGINES
from .draws import DRAWS, SUMS, P, X
from .same import LAYOUTS, compare, every_layout, place


@pytest.fixture(scope="module", autouse=True, params=ENGINES)
def torch_random(request: pytest.FixtureRequest) -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(engine=request.param, random="torch")
    yield
    dtorch.shutdown()


@every_layout
@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_is_bit_equal(name: str, layout: str) -> None:
    exact = layout != "partial" and name not in SUMS
    torch.manual_seed(5)
    expected = DRAWS[name](X.clone(), P.clone()), torch.rand(1)
    torch.manual_seed(5)
    compare((DRAWS[name](place(X, layout), place(P, layout)), torch.rand(1)), expected, exact=exact)


@every_layout
def test_training_with_dropout(layout: str) -> None:
    def train(x: Any, w: Any) -> Any:
        torch.manual_seed(2)
        loss = F.dropout(F.alpha_dropout(x, 0.3, training=True) * w, 0.5).pow(2).sum()
        loss.backward()
        return loss, w.grad

    w = X.cos().requires_grad_()
    compare(train(place(X, layout), place(w.detach().requires_grad_(), layout)), train(X, w))


@every_layout
def test_factories_are_bit_equal(layout: str) -> None:
    mesh, placements = LAYOUTS[layout]
    where = {"device_mesh": dtorch.DeviceMesh("cpu", mesh), "placements": placements(2)}
    torch.manual_seed(1)
    ours = dtorch.rand(5, 3, **where), dtorch.randn(5, 3, **where), dtorch.rand(2, 2, **where)
    torch.manual_seed(1)
    compare(ours, (torch.rand(5, 3), torch.randn(5, 3), torch.rand(2, 2)))
