"""A name that is nearly right is refused with the one that is, throughout the public surface."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard, hints, io, nn, pipeline

pytestmark = pytest.mark.usefixtures("simulated")

#: Made by the library, or of torch's C++: not called by name.
MADE = {
    "Graph",
    "Loaded",
    "Partial",
    "Placement",
    "Recording",
    "Replicate",
    "Shard",
    "Summary",
    "TensorFuture",
    "WorkerStatus",
}


def is_function_of(module: types.ModuleType, one: object) -> bool:
    return isinstance(one, types.FunctionType) and one.__module__ == module.__name__


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """What takes arguments: functions, classes, and methods of a tensor."""
    ours = {
        "dtorch": (dtorch, dtorch.__all__),
        "nn": (nn, nn._OURS),
        "io": (io, io.__all__),
        "pipeline": (pipeline, [name for name, one in vars(pipeline).items() if is_function_of(pipeline, one)]),
    }
    for home, (module, names) in ours.items():
        for name in names:
            found = getattr(module, name)
            if callable(found) and not name.startswith("_") and name not in MADE:
                yield f"{home}.{name}", found
    x = dtorch.ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]))
    for name in ("check_placement", "redistribute", "redistribute_by_dict", "redistribute_like"):
        yield f"Tensor.{name}", getattr(x, name)


def parameters(found: Callable[..., Any]) -> list[str]:
    """The names by which arguments may be given; none where any are taken."""
    given = inspect.signature(found).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in given):
        return []
    return [one.name for one in given if one.kind is not one.VAR_POSITIONAL and len(one.name) > 3]


def test_near() -> None:
    assert hints.near("placement", ["check_placement", "placements"]) == "; did you mean 'placements'?"
    assert hints.near("mesh", ["names", "device_mesh"]) == "; did you mean 'device_mesh'?"
    assert hints.near("device_mesh", ["module", "mesh", "plan"]) == "; did you mean 'mesh'?"
    assert hints.near("colour", ["dtype", "size"]) == ""


def test_every_public_function() -> None:
    tried = 0
    for name, found in public():
        for parameter in parameters(found):
            with pytest.raises(
                TypeError, match=rf"unexpected keyword argument '{parameter}s'.*mean '{parameter}'"
            ) as raised:
                found(**{parameter + "s": None})
            assert f"{name.split('.')[-1]}(): " in str(raised.value), name
            tried += 1
    assert tried > 50


@pytest.mark.parametrize("make", [dtorch.zeros, dtorch.ones_like, dtorch.Tensor, dtorch.tensor, dtorch.rand])
@pytest.mark.parametrize(
    ("given", "meant"), [("mesh", "device_mesh"), ("placement", "placements"), ("require_grad", "requires_grad")]
)
def test_where_a_new_tensor_goes(make: Any, given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"'{given}'; did you mean '{meant}'"):
        make(torch.ones(2), **{given: None})


def test_torch_compiles_options() -> None:
    for options in ({"fullgraph": True}, {"mode": "reduce-overhead"}, {"dynamic": False}):
        with pytest.raises(TypeError, match=r"torch.compile's options do not apply here: .*backend=.*verify="):
            dtorch.compile(torch.nn.Linear(2, 2), **options)
        with pytest.raises(TypeError, match=r"torch.compile's options do not apply"):
            dtorch.compile(**options)


def test_torch_compile_of_our_tensors() -> None:
    with pytest.raises(Exception, match=r"cannot trace dtorch tensors: dtorch\.compile runs"):
        torch.compile(lambda x: x + 1, backend="eager")(dtorch.ones(2, device_mesh=DeviceMesh("cpu", [0, 1])))


def test_an_attribute(capsys: pytest.CaptureFixture[str]) -> None:
    x = dtorch.ones(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
    for given, meant in {"placement": "placements", "mesh": "device_mesh", "shards": "local_shards"}.items():
        with pytest.raises(AttributeError, match=f"no attribute '{given}'; did you mean '{meant}'"):
            getattr(x, given)
    with pytest.raises(AttributeError, match=r"has no attribute 'redistibute'$") as raised:
        _ = x.redistibute
    sys.__excepthook__(raised.type, raised.value, None)
    assert "Did you mean: 'redistribute'?" in capsys.readouterr().err
    assert not {"mesh", "to_local"} & set(dir(x))
    assert {"device_mesh", "redistribute", "__add__"} <= set(dir(x))
    with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
        _ = x.colour
    with pytest.raises(AttributeError, match="one program runs all devices"):
        x.to_local()
    assert getattr(x, "placement", 3) == 3
    assert not hasattr(x, "_placements")
    x.colour = "red"
    assert x.colour == "red"
    with pytest.raises(AttributeError, match=r"distribute_tensr.*did you mean 'distribute_tensor'"):
        _ = dtorch.distribute_tensr


def test_a_parameter_is_one_and_another_tensor_is_not() -> None:
    x = dtorch.ones(2, device_mesh=DeviceMesh("cpu", [0, 1]))
    assert isinstance(torch.nn.Parameter(x), torch.nn.Parameter)
    assert not isinstance(x, torch.nn.Parameter)
