"""What is kept for the next op of a shape is bounded: values stay right when it is forgotten, and no table grows with the shapes met."""

from __future__ import annotations

import collections
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard
from dtorch.client import planning, runtime
from dtorch.client.planning import FORMS, PLANS
from dtorch.client.recent import Recent

MESH = DeviceMesh("cpu", [0, 1])


def work(x: Any, weight: Any) -> Any:
    """Ops of several families, some of which move ``x``."""
    y = torch.cat([(x @ weight).softmax(-1), x[1:]])
    y += 1
    return (y.view(-1, 2, 4).transpose(1, 2) * 2).sum(0) + x.cumsum(0)[-1, :2] + x.sum()


def of_rows(rows: int) -> tuple[Any, Any]:
    x, weight = torch.arange(8.0 * rows).view(rows, 8) / (8 * rows), torch.arange(64.0).view(8, 8) / 64
    placed = dtorch.distribute_tensor(x, MESH, [Shard(0)]), dtorch.distribute_tensor(weight, MESH, [Replicate()])
    return work(*placed), work(x, weight)


def test_values_are_right_though_plans_are_forgotten(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planning.forget_plans()
    for kept in (PLANS, FORMS):
        monkeypatch.setattr(kept, "limit", 12)
    before = PLANS.evictions, FORMS.evictions
    for rows in (*range(3, 12), *range(3, 12)):
        found, expected = of_rows(rows)
        torch.testing.assert_close(found.to_torch(), expected)
        assert PLANS.kept <= 13
    assert PLANS.evictions > before[0]
    assert FORMS.evictions > before[1]


def test_the_least_recently_used_goes_first() -> None:
    recent = Recent(8)
    for number in range(100):
        recent.put(number, number)
        assert (recent.get("often") or recent.older("often")) == (None if number == 0 else "used")
        if number == 0:
            recent.put("often", "used")
        assert recent.kept <= 9
    assert recent.misses == 1
    assert recent.older(0) is None
    assert recent.older(98) == 98 or recent.get(98) == 98
    assert recent.evictions >= 90
    recent.forget()
    assert (recent.kept, recent.misses) == (0, 2)


def test_counts_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    dtorch.shutdown()
    dtorch.init(engine="simulate")
    of_rows(3)
    with caplog.at_level(logging.DEBUG, "dtorch"):
        dtorch.shutdown()
    assert any(message.startswith("plans: ") and "evictions" in message for message in caplog.messages)


def tables() -> dict[str, int]:
    """The sizes of what may grow: containers of dtorch's modules and of the cluster, and caches of functions without a limit."""
    found: dict[str, int] = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, (Recent, weakref.WeakValueDictionary, weakref.WeakKeyDictionary)):
            return
        if isinstance(value, (dict, set, list, collections.deque)):
            found[name] = len(value)
        elif isinstance(value, Callable) and hasattr(value, "cache_info") and value.cache_info().maxsize is None:
            found[name] = value.cache_info().currsize

    for module in [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "dtorch"]:
        for name, value in vars(module).items():
            look(f"{module.__name__}.{name}", value)
    controller = runtime.controller()
    world = controller.engine._world  # type: ignore[attr-defined]
    owners = [controller, world, world._codes, *world._executors.values()]
    for owner in owners:
        for name in [*getattr(type(owner), "__slots__", ()), *vars(owner)]:
            look(f"{type(owner).__name__}.{name}", getattr(owner, name))
    return found


def test_no_table_grows_with_the_shapes_met() -> None:
    dtorch.shutdown()
    dtorch.init(engine="simulate")
    batches = (range(3, 40), range(40, 50), range(50, 120))

    def run(batch: range) -> dict[str, int]:
        for rows in batch:
            of_rows(rows)
        dtorch.synchronize()
        return tables()

    run(batches[0])
    before, after = run(batches[1]), run(batches[2])
    grown = {
        name: (before[name], size)
        for name, size in after.items()
        if name in before and size >= before[name] + len(batches[2])
    }
    dtorch.shutdown()
    assert not grown


def test_caches_of_functions_have_a_limit_where_shapes_are_their_keys() -> None:
    """Those without are known, and their keys are ops or kinds of exceptions: so many and no more."""
    unlimited = {
        f"{module.__name__}.{name}"
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").partition(".")[0] == "dtorch"
        for name, value in vars(module).items()
        if isinstance(value, functools._lru_cache_wrapper)
        and value.cache_info().maxsize is None
        and value.__module__ == module.__name__
    }
    assert unlimited <= {
        "dtorch.sharding.choose._returned_arguments",
        "dtorch.sharding.strategy.schema_arguments",
        "dtorch.client.failures.remote",
    }, unlimited
