"""Random numbers: the same seed gives the same values on every mesh, placement and engine, and torch's own with a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtorch

from .draws import DRAWS, SUMS, P, X
from .same import LAYOUTS, compare, every_engine, every_layout, place

pytestmark = every_engine

WITH_GENERATOR: dict[str, Callable[[Any, Any, Any], Any]] = {
    "uniform_": lambda x, p, g: x.uniform_(generator=g),
    "normal_": lambda x, p, g: x.normal_(generator=g),
    "exponential_": lambda x, p, g: x.exponential_(generator=g),
    "random_": lambda x, p, g: x.random_(0, 9, generator=g),
    "bernoulli": lambda x, p, g: torch.bernoulli(p, generator=g),
    "bernoulli_": lambda x, p, g: x.bernoulli_(0.5, generator=g),
    "multinomial": lambda x, p, g: torch.multinomial(p[1], 2, generator=g),
    "normal": lambda x, p, g: torch.normal(x, p, generator=g),
    "poisson": lambda x, p, g: torch.poisson(p, generator=g),
}


def drawn(draw: Callable[..., Any], layout: str, *more: Any) -> Any:
    torch.manual_seed(7)
    result = draw(place(X, layout), place(P, layout), *more)
    after = torch.rand(2)  # the client's generator has moved on in the same way
    return [r.detach().to_torch() for r in (result if isinstance(result, tuple) else (result,))], after


#: Values by draw, of the first engine and layout that drew them.
FIRST: dict[str, Any] = {}


@pytest.mark.parametrize("name", DRAWS)
def test_values_depend_on_the_seed_alone(name: str) -> None:
    for layout in LAYOUTS:
        found = drawn(DRAWS[name], layout)
        # A sum that is split rounds elsewhere; what was drawn is the same.
        compare(found, FIRST.setdefault(name, found), exact=name not in SUMS)


@pytest.mark.parametrize("name", sorted(set(DRAWS) - {"randperm", "dropout1d", "dropout2d", "feature_alpha_dropout"}))
def test_they_look_random(name: str) -> None:
    torch.manual_seed(0)
    one = DRAWS[name](place(X, "first"), place(P, "first"))
    two = DRAWS[name](place(X, "first"), place(P, "first"))
    one, two = (r[0] if isinstance(r, tuple) else r for r in (one, two))
    assert not torch.equal(one, two)
    plain = DRAWS[name](X.clone(), P.clone())
    plain = plain[0] if isinstance(plain, tuple) else plain
    assert (one.shape, one.dtype, one.stride()) == (plain.shape, plain.dtype, plain.stride())


@every_layout
@pytest.mark.parametrize("name", WITH_GENERATOR)
def test_an_explicit_generator_gives_torchs_own_values(name: str, layout: str) -> None:
    ours = WITH_GENERATOR[name](place(X, layout), place(P, layout), torch.Generator().manual_seed(3))
    compare(
        ours, WITH_GENERATOR[name](X.clone(), P.clone(), torch.Generator().manual_seed(3)), exact=layout != "partial"
    )


@every_layout
def test_factories(layout: str) -> None:
    mesh, placements = LAYOUTS[layout]
    where = {"device_mesh": dtorch.DeviceMesh("cpu", mesh), "placements": placements(2)}
    for name, arguments in (("rand", (5, 3)), ("randn", (5, 3)), ("randint", (0, 9, (5, 3)))):
        if name == "randint" and layout == "partial":
            continue
        dtorch.manual_seed(4)
        found = getattr(dtorch, name)(*arguments, **where).to_torch()
        compare(found, FIRST.setdefault(f"factory {name}", found), exact=True)
        made = getattr(dtorch, name)(*arguments, **where, generator=torch.Generator().manual_seed(1))
        compare(made, getattr(torch, name)(*arguments, generator=torch.Generator().manual_seed(1)))


@every_layout
def test_the_state_of_the_generator(layout: str) -> None:
    x = place(X, layout)
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    with torch.random.fork_rng():
        inside = torch.rand_like(x)
    again = torch.rand_like(x)
    assert torch.equal(inside, again)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand_like(x), first)
    torch.seed()
    assert not torch.equal(torch.rand_like(x), first)


@every_layout
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_dropout_draws_the_same_again(layout: str, reentrant: bool) -> None:
    w = nn.Parameter(place(X, layout))
    kept: list[Any] = []

    def f(a: Any) -> Any:
        out = F.dropout(a.sin(), 0.5)
        kept.append(out.detach())
        return out.cos()

    checkpoint(f, w, use_reentrant=reentrant).sum().backward()
    assert len(kept) == 2
    assert torch.equal(*kept)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64], ids=str)
def test_every_draw_of_one_element_or_none(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A draw that torch makes of such a tensor has the same shape and dtype here."""
    x, p = torch.ones(shape, dtype=dtype), torch.full(shape, 0.5)
    mesh = dtorch.DeviceMesh("cpu", [0, 1])
    for name, draw in DRAWS.items():
        try:
            plain = draw(x.clone(), p)
        except (RuntimeError, IndexError, ValueError):
            continue
        if name == "normal of a mean" and dtype == torch.int64:
            continue  # torch looks at the dtype only where there is something to draw
        ours = draw(dtorch.from_torch(x, mesh), dtorch.from_torch(p, mesh))
        one, other = (r[0] if isinstance(r, tuple) else r for r in (plain, ours))
        assert (other.to_torch().shape, other.dtype) == (one.shape, one.dtype), name
