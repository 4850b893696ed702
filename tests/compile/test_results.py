"""What a captured call returns is built as the function builds it, and keeps nothing alive that nobody has."""

from __future__ import annotations

import collections
import dataclasses
import gc
import weakref
from typing import Any

import pytest
import torch

import dtorch

from .same import captured, close, placed

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.filterwarnings("error:dtorch.compile")]

Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Output:
    value: torch.Tensor
    others: Any = None


class Ordered(collections.OrderedDict):
    pass


def test_one_object_stays_one() -> None:
    constant = torch.ones(2)

    @dtorch.compile
    def function(x: torch.Tensor) -> Any:
        y, plain = x + 1, constant * 2
        inner = [y, None, 3]
        ordered = Ordered(y=y, inner=inner)
        ordered.note = {"y": y}  # type: ignore[attr-defined]
        return {
            "pair": Pair(inner, (y, x)),
            5: Output(y, inner),
            "ordered": ordered,
            "plain": [plain, plain],
            "empty": [],
        }

    x = placed(torch.ones(2))
    function(x)
    earlier = captured(function, x)
    found = captured(function, placed(torch.zeros(2)))
    y = found["pair"].second[0]
    close(y, torch.ones(2))
    close(earlier["pair"].second[0], torch.full((2,), 2.0))
    assert type(found["pair"]) is Pair
    assert found["pair"].first[1:] == [None, 3]
    assert all(
        one is y for one in (found["pair"].first[0], found[5].value, found["ordered"]["y"], found["ordered"].note["y"])
    )
    assert found["pair"].first is found[5].others is found["ordered"]["inner"]
    assert type(found["ordered"]) is Ordered
    assert list(found["ordered"]) == ["y", "inner"]
    assert found["plain"][0] is found["plain"][1]
    assert torch.equal(found["plain"][0], torch.full((2,), 2.0))
    assert found["empty"] is not earlier["empty"]
    assert found["plain"][0] is not earlier["plain"][0]


def test_nothing_is_kept() -> None:
    layer = dtorch.distribute_module(torch.nn.Linear(2, 2), placed(torch.ones(2)).device_mesh, {})
    x = placed(torch.ones(2))
    with torch.no_grad():
        compiled = dtorch.compile(lambda x: Output(layer(x), [x * 2]))
        values = []
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                result = compiled(x)
                values += [weakref.ref(result.value._value), weakref.ref(result.others[0]._value)]
                del result
                assert all(value() is None for value in values[2:])  # the first call's own objects may be in a cycle
            program = weakref.ref(compiled.program.guards)
            del compiled
            alive = program() is not None
        finally:
            gc.enable()
    gc.collect()
    assert values[0]() is None
    assert program() is None
    assert not alive


def test_the_callers_line_is_in_the_error() -> None:
    compiled = dtorch.compile(lambda x, i: x[i] * 2)
    x, good, bad = placed(torch.ones(3)), placed(torch.tensor([1])), placed(torch.tensor([7]))
    compiled(x, good)
    result = compiled(x, bad)  # here
    with pytest.raises(IndexError, match=r"test_results.py:\d+.*# here"):
        result.to_torch()
