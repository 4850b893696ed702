"""``print`` shows what torch would, whatever the dtype, size and print options, then shape, dtype, mesh and placements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch

from .same import every_engine, every_layout, place

pytestmark = every_engine

VALUES: dict[str, Any] = {
    "floats": torch.linspace(-2, 2, 24).reshape(4, 6),
    "small": torch.tensor([1e-8, 1.0]),
    "large": torch.tensor([1e10, 1.0]),
    "nan and inf": torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0]),
    "whole floats": torch.tensor([1.0, 2.0, 3.0]),
    "ints": torch.arange(24).reshape(2, 3, 4),
    "bools": torch.tensor([True, False, True]),
    "bfloat16": torch.linspace(0, 1, 4).bfloat16(),
    "half": torch.linspace(0, 1, 4).half(),
    "double": torch.linspace(0, 1, 4).double(),
    "complex": torch.complex(torch.linspace(0, 1, 4), torch.linspace(1, 0, 4)),
    "uint8": torch.arange(4).to(torch.uint8),
    "0-d": torch.tensor(3.5),
    "0-d int": torch.tensor(3),
    "empty": torch.zeros(0),
    "empty rows": torch.zeros(0, 3),
    "empty columns": torch.zeros(3, 0),
    "long": torch.arange(2000.0),
    "long ints": torch.arange(-1000, 1000),
    "wide": torch.linspace(0, 1, 3000).reshape(3, 1000),
    "tall": torch.linspace(0, 1, 3000).reshape(1000, 3),
    "deep": torch.linspace(0, 1, 4096).reshape(8, 8, 8, 8),
    "one outlier": torch.cat([torch.zeros(1500), torch.tensor([1e9]), torch.zeros(3)]),
    "long bools": torch.arange(2000) % 3 == 0,
    "long complex": torch.complex(torch.arange(1200.0), torch.ones(1200)),
    "turned": torch.arange(12.0).reshape(3, 4).t(),
}


@pytest.fixture(params=["default", "short", "sci", "full", "precise", "edges", "narrow"])
def options(request: pytest.FixtureRequest) -> Iterator[None]:
    before = dict(vars(torch._tensor_str.PRINT_OPTS))
    chosen: dict[str, dict[str, Any]] = {
        "default": {"profile": "default"},
        "short": {"profile": "short"},
        "sci": {"sci_mode": True},
        "full": {"profile": "full"},
        "precise": {"precision": 7},
        "edges": {"threshold": 5, "edgeitems": 1},
        "narrow": {"linewidth": 40},
    }
    torch.set_printoptions(**chosen[request.param])
    yield
    vars(torch._tensor_str.PRINT_OPTS).update(before)


def expected(plain: torch.Tensor) -> str:
    """torch's values, which it prints after the eight characters of "tensor(" as we do, and without what it says after them."""
    return torch._tensor_str._tensor_str(plain, len("tensor("))


@pytest.mark.parametrize("name", VALUES)
def test_values_are_printed_as_torch_prints_them(name: str, options: None) -> None:
    plain = VALUES[name]
    x = place(plain, "first")
    text = repr(x)
    tail = f", shape={tuple(plain.shape)}, dtype={plain.dtype}, device_mesh={x.device_mesh!r}, placements={x.placements!r})"
    assert text.endswith(tail)
    assert text == f"tensor({expected(plain)}{tail}"


@every_layout
def test_every_placement_prints_the_same_values(layout: str) -> None:
    for plain in (VALUES["floats"], VALUES["long"], VALUES["0-d"]):
        assert repr(place(plain, layout)).startswith(f"tensor({expected(plain)}, shape=")


def test_str_format_and_repr_agree() -> None:
    x = place(VALUES["floats"], "first")
    assert str(x) == repr(x) == f"{x}" == f"{x!r}" == "{}".format(x) == "%s" % x  # noqa: UP031, UP032
    assert f"{x=}" == f"x={x!r}"


@pytest.mark.parametrize("spec", ["", ".3f", "8", "d", "e", "%", ">10", "no spec"])
@pytest.mark.parametrize("value", [3.0, 2.5, 3, True, 1 + 2j, float("nan"), [1.0, 2.0], [], [[1]]])
def test_numbers_are_formatted_as_torch_formats_them(value: Any, spec: str) -> None:
    """A tensor without dims as the number that it is; others take no format, and print whole."""

    def formatted(x: torch.Tensor) -> str:
        try:
            return format(x, spec)
        except (TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    plain = torch.tensor(value)
    asked = [plain, plain.clone().requires_grad_()] if plain.dtype.is_floating_point else [plain]
    for one in asked:
        x = place(one, "first")
        told = formatted(one)
        assert formatted(x) == (repr(x) if told == repr(one) else told)
        assert "%s" % x == str(x) == repr(x)  # noqa: UP031


def test_a_parameter_without_dims_is_no_number() -> None:
    p = torch.nn.Parameter(place(torch.tensor(2.0), "first"))
    assert f"{p}" == repr(p)
    assert f"{p:.1f}" == "2.0"


def test_autograd_is_shown() -> None:
    x = place(VALUES["floats"].clone().requires_grad_(), "first")
    assert repr(x).endswith(", requires_grad=True)")
    assert "grad_fn=<MulBackward0>)" in repr(x * 2)
    assert "requires_grad" not in repr(x.detach())


def test_an_uncommitted_tensor_prints_too() -> None:
    assert repr(dtorch.ones(2)).startswith("tensor([1., 1.], shape=(2,), dtype=torch.float32")


def test_modules_and_optimizers_print() -> None:
    layer = torch.nn.Linear(3, 2)
    layer.weight = torch.nn.Parameter(place(torch.ones(2, 3), "first"))
    assert repr(layer) == "Linear(in_features=3, out_features=2, bias=True)"
    assert "ParameterList" in repr(torch.nn.ParameterList([layer.weight]))
    assert "Shard(dim=0)" in repr(layer.weight)
    assert "SGD" in repr(torch.optim.SGD(layer.parameters(), lr=0.1))
