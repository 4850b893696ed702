"""Training goes on as if it had not stopped: 10 and 10 steps are 20, on the same mesh and on another."""

from __future__ import annotations

import collections
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, distribute_module
from dtorch.io import load_state, save_state

pytestmark = pytest.mark.usefixtures("engine")

TWO = DeviceMesh("cpu", [0, 1], ("tp",))
PLAN = {"0.*": {"tp": Shard(0)}, "3.weight": {"tp": Shard(1)}}
#: Where the second half of the training runs.
MESHES: dict[str, tuple[DeviceMesh | None, Any]] = {
    "the same": (TWO, PLAN),
    "fsdp over three": (DeviceMesh("cpu", [0, 1, 2]), {"*": [Shard(0)]}),
    "a grid": (DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp")), PLAN),
    "plain": (None, None),
}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "groups": lambda p: torch.optim.RAdam([{"params": list(p), "betas": (0.8, 0.9)}], lr=0.05),
}
STEPS = 10


class Run:
    """A model with dropout, an optimizer, two schedulers, and data from torch's, Python's and numpy's random numbers."""

    def __init__(self, mesh: DeviceMesh | None, plan: Any, optimizer: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.mesh = mesh
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8),
            torch.nn.GELU(),
            torch.nn.Dropout(0.25),
            torch.nn.Linear(8, 4),
            torch.nn.BatchNorm1d(4),
        )
        if mesh is not None:
            distribute_module(self.model, mesh, plan)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [
                torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: (step + 1) / 4),
                torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [5, 9, 9]),
            ],
            [4],
        )
        self.generator = torch.Generator().manual_seed(seed)

    def objects(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generator": self.generator,
        }

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x = torch.randn(6, 4, generator=self.generator) + torch.rand(()) + random.random() + numpy.random.rand()
            if self.mesh is not None:
                x = dtorch.distribute_tensor(x, self.mesh)
            loss = (self.model(x) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.fixture(scope="module")
def draws_as_torch(engine: str) -> None:
    """Dropout of plain torch and of any mesh must be the same, so that they can be compared."""
    dtorch.shutdown()
    dtorch.init(engine=engine, random="torch")


@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [*((mesh, "AdamW") for mesh in MESHES), *(("fsdp over three", name) for name in OPTIMIZERS if name != "AdamW")],
)
def test_ten_and_ten_steps_are_twenty(mesh: str, optimizer: str, tmp_path: Path, draws_as_torch: None) -> None:
    expected = Run(None, None, optimizer).train(2 * STEPS)  # plain torch, not stopped
    first = Run(TWO, PLAN, optimizer)
    losses = first.train(STEPS)
    save_state(tmp_path / "state", **first.objects(), step=STEPS)
    again = Run(*MESHES[mesh], optimizer, seed=7)
    again.train(1)  # it has state of its own
    assert load_state(tmp_path / "state", **again.objects()) == {"step": STEPS}
    after = again.train(STEPS)
    torch.testing.assert_close(torch.tensor(losses + after), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    if mesh == "the same":
        random_again = Run(TWO, PLAN, optimizer)
        assert random_again.train(2 * STEPS) == losses + after  # to the bit


@pytest.mark.parametrize("mesh", ["the same", "fsdp over three"])
def test_with_counted_random_numbers(mesh: str, tmp_path: Path, engine: str) -> None:
    """The default way of drawing does not depend on the mesh either."""
    dtorch.shutdown()
    dtorch.init(engine=engine)
    expected = Run(TWO, PLAN, "AdamW").train(2 * STEPS)
    first = Run(TWO, PLAN, "AdamW")
    losses = first.train(STEPS)
    save_state(tmp_path / "state", **first.objects())
    again = Run(*MESHES[mesh], "AdamW", seed=7)
    load_state(tmp_path / "state", **again.objects())
    torch.testing.assert_close(torch.tensor(losses + again.train(STEPS)), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_where_the_state_goes(tmp_path: Path) -> None:
    """Where the parameters are, wherever it was; counts of steps stay plain."""
    first = Run(TWO, PLAN, "AdamW")
    first.train(2)
    save_state(tmp_path, optimizer=first.optimizer)
    mesh, plan = MESHES["fsdp over three"]
    again = Run(mesh, plan, "AdamW")
    load_state(tmp_path, optimizer=again.optimizer)
    before = list(first.optimizer.state.values())
    assert len(again.optimizer.state) == len(before) == 6
    for parameter, there, here in zip(again.model.parameters(), again.optimizer.state.values(), before, strict=True):
        assert parameter in again.optimizer.state
        assert there.keys() == here.keys()
        assert type(there["step"]) is torch.Tensor
        assert there["step"] == here["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert there[name].placements == parameter.placements
            assert there[name].device_mesh == mesh
            assert torch.equal(there[name].to_torch(), here[name].to_torch())


class Extra(torch.nn.Module):
    def __init__(self, note: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(5, 3))
        self.tied = self.weight
        self.note = note

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def test_extra_state_and_tied_tensors(tmp_path: Path) -> None:
    plan = {"*": [Shard(0)]}
    first = distribute_module(Extra((1, "a", {2: None})), TWO, plan)
    save_state(tmp_path, model=first)
    again = distribute_module(Extra(None), TWO, plan)
    weight = again.weight
    load_state(tmp_path, model=again)
    assert again.note == (1, "a", {2: None})
    assert again.weight is again.tied is weight
    assert torch.equal(again.weight.to_torch(), first.weight.to_torch())
    assert (tmp_path / "state.safetensors").stat().st_size < 5 * 3 * 4 + 12000  # the weight once, and random states


VALUES: dict[str, Any] = {
    "scalars": [None, True, 3, -1.5, float("inf"), "text", 1 << 70, 1 + 2j, torch.bfloat16],
    "kinds": (1, [2, (3,)], {4}, frozenset({5}), collections.deque([6])),
    "maps": {1: "int", "a": {None: 2.5}, (1, 2): True},
    "counter": collections.Counter([1, 1, 2]),
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "numpy": [numpy.arange(6, dtype=numpy.int16).reshape(2, 3), numpy.float32(1.5), numpy.int64(3)],
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, numpy.ndarray):
        return bool(a.dtype == b.dtype and numpy.array_equal(a, b))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and all(map(same, a, b)) and len(a) == len(b)
    return bool(type(a) is type(b) and a == b)


def test_values_come_back_as_they_were(tmp_path: Path) -> None:
    placed = dtorch.arange(6, device_mesh=TWO, placements=[Shard(0)])
    save_state(tmp_path, **VALUES, tensors={"plain": torch.ones(2), "placed": placed, "again": [placed]})
    found = load_state(tmp_path)
    assert list(found) == [*VALUES, "tensors"]
    for name, value in VALUES.items():
        assert same(found[name], value), name
    tensors = found["tensors"]
    assert type(tensors["plain"]) is torch.Tensor
    assert torch.equal(tensors["plain"], torch.ones(2))
    assert isinstance(tensors["placed"], dtorch.Tensor)
    assert torch.equal((tensors["placed"] + placed).to_torch(), torch.arange(6) * 2)
    assert torch.equal(tensors["again"][0].to_torch(), torch.arange(6))


def test_a_tensor_is_filled_in_place(tmp_path: Path) -> None:
    values = torch.randn(5, 3)
    save_state(tmp_path, x=dtorch.distribute_tensor(values, TWO, [Shard(1)]), y=values)
    x = dtorch.zeros(5, 3, device_mesh=DeviceMesh("cpu", [0, 1, 2]), placements=[Shard(0)])
    y = torch.zeros(5, 3)
    assert load_state(tmp_path, x=x, y=y) == {}
    assert torch.equal(x.to_torch(), values)
    assert torch.equal(y, values)


def test_any_object_with_a_state_dict(tmp_path: Path) -> None:
    """Its tensors go where those are that it has now."""

    class Average:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": [self.value], "other": self.value * 2 if self.value.numel() == 4 else None}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            (self.value,), self.other = state["value"], state["other"]

    save_state(tmp_path, average=Average(dtorch.arange(4, device_mesh=TWO, placements=[Shard(0)])))
    other = Average(dtorch.zeros(4, device_mesh=TWO, placements=[Replicate()]))
    load_state(tmp_path, average=other)
    assert other.value.placements == [Replicate()]
    assert torch.equal(other.value.to_torch(), torch.arange(4))
    assert torch.equal(other.other.to_torch(), torch.arange(4) * 2)


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    save_state(tmp_path / "state", step=1)
    with pytest.raises(TypeError, match=r"bad\.a\.1 is a object, which cannot be kept"):
        save_state(tmp_path / "state", step=2, bad={"a": [1, object()]})
    with pytest.raises(TypeError, match=r"'bad' is torch\.complex128"):
        save_state(tmp_path / "state", step=2, bad=torch.ones(2, dtype=torch.complex128))
    assert load_state(tmp_path / "state") == {"step": 1}
    assert os.listdir(tmp_path) == ["state"]


def test_bad_input(tmp_path: Path) -> None:
    layer = distribute_module(torch.nn.Linear(4, 3), TWO, {"*": [Shard(0)]})
    optimizer = torch.optim.SGD(layer.parameters())
    with pytest.raises(FileNotFoundError, match=r"no state\.json in"):
        load_state(tmp_path, model=layer)
    save_state(tmp_path, model=layer, optimizer=optimizer, step=3, x=torch.ones(2))
    weight = layer.weight.to_torch()
    others = torch.nn.Linear(4, 4), torch.nn.Sequential(layer), torch.optim.SGD([layer.weight])
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"'modle' was not saved in .*; there are 'model', 'optimizer', 'step', 'x'"):
        load_state(tmp_path, model=layer, modle=layer)
    with pytest.raises(ValueError, match=r"'model' was saved as a module in .*, and a SGD was given"):
        load_state(tmp_path, model=optimizer)
    with pytest.raises(ValueError, match="'step' is a value, which load_state returns"):
        load_state(tmp_path, step=3)
    with pytest.raises(ValueError, match=r"'model\.weight' has shape \(3, 4\) in .*state\.safetensors and \(4, 4\)"):
        load_state(tmp_path, x=torch.zeros(2), model=others[0])
    with pytest.raises(ValueError, match=r"'0\.weight' of the module is missing"):
        load_state(tmp_path, model=others[1])
    with pytest.raises(ValueError, match=r"'x' has shape \(2,\)"):
        load_state(tmp_path, x=torch.zeros(3))
    with pytest.raises(ValueError, match="doesn't match the size"):
        load_state(tmp_path, optimizer=others[2])
    assert torch.equal(layer.weight.to_torch(), weight)
    assert torch.equal(torch.get_rng_state(), before)
    (tmp_path / "state.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(ValueError, match=r"state\.json is damaged"):
        load_state(tmp_path, model=layer)


def _places(data: Any, path: tuple = ()) -> Iterator[tuple]:
    """Every place in JSON, of long lists only the beginning."""
    items = data.items() if isinstance(data, dict) else enumerate(data[:2]) if isinstance(data, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from _places(item, (*path, key))


@pytest.mark.parametrize("wrong", [None, [], {"tensor": "y", "placed": True}], ids=str)
def test_a_damaged_state_changes_nothing(wrong: Any, tmp_path: Path, engine: str) -> None:
    if engine != "simulate":
        pytest.skip("the client reads it")
    layer = distribute_module(torch.nn.Linear(4, 3), TWO, {"*": [Shard(0)]})
    save_state(tmp_path, model=layer, values=[1, {"a": torch.ones(2)}], x=torch.ones(2), generator=torch.Generator())
    x, numbers = torch.zeros(2), torch.get_rng_state()
    good = (tmp_path / "state.json").read_text()
    refused = []
    for path in _places(json.loads(good)["objects"]):
        document = json.loads(good)
        place = document["objects"]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = wrong
        (tmp_path / "state.json").write_text(json.dumps(document))
        try:
            load_state(tmp_path, model=layer, x=x, generator=torch.Generator())
        except ValueError as error:
            refused.append((str(error), bool(x.any())))
        x.zero_()
    assert len(refused) > 10
    assert [text for text, changed in refused if changed or str(tmp_path) not in text] == []
    assert torch.equal(torch.get_rng_state(), numbers)
