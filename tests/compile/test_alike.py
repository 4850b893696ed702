"""The code that knows a call at sight knows it only if `Arguments.key` is the recorded one's, and then finds the same tensors."""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch.capture.alike import match_of
from dtorch.capture.arguments import Arguments

from .same import MESH, captured, close, placed

pytestmark = pytest.mark.usefixtures("simulated")


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


class Name(str):
    __slots__ = ()


def _calls() -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Calls of which hardly two are alike."""
    x, y = placed(torch.ones(2, 3)), placed(torch.ones(2, 3))
    wide, leaf = placed(torch.ones(2, 4)), placed(torch.ones(2, 3)).requires_grad_()
    host = torch.zeros(2, 3, device=x.device)
    plain, parameter = torch.ones(2, 3), torch.nn.Parameter(torch.ones(2, 3))
    values = [
        x, y, wide, leaf, host, torch.zeros(3, 2, device=x.device).T, plain, plain.clone(), plain.T, plain.double(), parameter,
        0, 1, True, False, None, 1.0, 0.0, -0.0, float("nan"), "a", Name("a"), b"a", torch.float32, torch.float64, Kind.ONE, Kind.TWO,
        torch.device("cpu"), MESH, dtorch.Shard(0), dtorch.Replicate(), object(), object(), torch.Size([1]), slice(1),
        [], (), [x], (x,), [x, x], [x, y], [x, [1, (2, y)]], [x, [1, (3, y)]], {"a": x}, {"b": x}, {"a": x, "b": 1}, {"b": 1, "a": x},
        collections.OrderedDict(a=x), {Name("a"): x}, {1: x}, {}, 1j,
    ]  # fmt: skip
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((value,), {}) for value in values]
    calls += [((x, value), {}) for value in (x, y, leaf, 1)]
    calls += [((), {"a": value}) for value in (x, 1, True)]
    calls += [
        ((), {}),
        ((), {"b": 1}),
        ((), {"a": 1, "b": x}),
        ((), {"b": x, "a": 1}),
        ((x,), {"a": x}),
        ((x,), {"a": y}),
    ]
    many = [placed(torch.ones(2, 3)) for _ in range(6)]
    return [*calls, (tuple(many), {}), ((*many[:5], many[0]), {}), ((*many[:5], many[4]), {})]


def test_what_is_known_is_alike() -> None:
    calls = _calls()
    keys = [Arguments(args, kwargs) for args, kwargs in calls]
    unsure = 0
    for (args, kwargs), known in zip(calls, keys, strict=True):
        match = match_of(args, kwargs)
        if match is None:
            unsure += 1
            continue
        for (others, named), other in zip(calls, keys, strict=True):
            tensors = match(others, named)
            if (args, kwargs) is not (others, named) and tensors is None:
                continue
            assert tensors is not None, (args, kwargs)
            assert other.key == known.key
            assert list(map(id, tensors)) == list(map(id, other.tensors))
        found = match(args, kwargs)
        assert found is not None
        assert list(map(id, found)) == list(map(id, known.tensors))
    assert unsure < 6


def _modes() -> list[Callable[[], Any]]:
    return [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: dtorch.default_mesh(MESH),
        dtorch.no_sync,
        lambda: dtorch.set_implicit_communication("warn"),
        _in_doubles,
    ]


@contextlib.contextmanager
def _in_doubles() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_a_call_in_another_mode_is_another() -> None:
    x = placed(torch.ones(2))
    for one, other in itertools.product(_modes(), _modes()):
        with one():
            match, key = match_of((x,), {}), Arguments((x,), {}).key
            assert match is not None
            assert match((x,), {}) is not None
        with other():
            assert (match((x,), {}) is not None) == (Arguments((x,), {}).key == key)


def test_calls_of_two_kinds_in_turn() -> None:
    @dtorch.compile
    def function(x: torch.Tensor, by: int = 1, *, and_more: Any = None) -> Any:
        return {"x": x * by, "list": [x + 1, and_more]}

    small, large = placed(torch.ones(2)), placed(torch.ones(3))
    for _ in range(2):
        function(small)
        function(large, 3, and_more="more")
    for _ in range(3):
        first, second = captured(function, small), captured(function, large, 3, and_more="more")
        close(first["x"], torch.ones(2))
        close(second["x"], torch.full((3,), 3.0))
        assert second["list"][1] == "more"
        assert first["list"][1] is None
