"""What a message or a warning says of where the user's code is."""

from __future__ import annotations

import linecache
import warnings

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch.client import lines

pytestmark = pytest.mark.usefixtures("simulated")

MESH = DeviceMesh("cpu", [0, 1])


def test_a_long_line_is_quoted_in_part() -> None:
    source = "def f(x):\n    return x.softmax(1) + (" + " + ".join(["1"] * 200) + ")\n"
    linecache.cache["<long>"] = (len(source), None, source.splitlines(True), "<long>")
    names: dict = {}
    exec(compile(source, "<long>", "exec"), names)
    x = dtorch.ones(4, 6, device_mesh=MESH, placements=[Shard(1)])
    with dtorch.set_implicit_communication("error"), pytest.raises(dtorch.errors.ImplicitCommunication) as raised:
        names["f"](x)
    first = str(raised.value).splitlines()[0]
    quoted = first.partition("<long>:2: ")[2]
    assert quoted.startswith("return x.softmax(1) + (1 + 1")
    assert quoted.endswith("…")
    assert len(quoted) == lines.QUOTED


@pytest.mark.parametrize("call", [lambda x: x.softmax(1), lambda x: torch.nn.functional.softmax(x, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_warnings_point_at_the_users_line(call: object, compiled: bool) -> None:
    """However many frames of torch and dtorch are between."""
    function = dtorch.compile(call) if compiled else call
    x = dtorch.ones(4, 6, device_mesh=MESH, placements=[Shard(1)])
    with dtorch.set_implicit_communication("warn"), pytest.warns(UserWarning, match="does not ask for") as told:
        function(x)  # type: ignore[operator]
    assert {one.filename for one in told} == {__file__}


def test_a_function_that_is_not_captured_is_warned_of_where_it_is_called() -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return step(x)

    step = dtorch.compile(lambda x: x[x > 0])
    x = dtorch.ones(4, 6, device_mesh=MESH)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert torch.equal(outer(x).to_torch(), torch.ones(24))
    assert [linecache.getline(one.filename, one.lineno).strip() for one in told] == ["return step(x)"]
