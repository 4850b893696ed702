"""One device's executor, by hand: what the simulation cannot show."""

from __future__ import annotations

import sys
import weakref

import msgspec
import pytest
import torch

from dtorch.engine import protocol
from dtorch.program.ir import Op, Operand, Program, Reshard, Slot
from dtorch.worker.executor import Executor
from dtorch.worker.poison import Poison

PROGRAM = protocol.FIRST_PROGRAM


@pytest.fixture
def device():
    events = []
    executor = Executor(0, events.append, None)
    executor.events = events
    executor.run([protocol.MESH, 1, "cpu", [2], [0, 1], None], 0)
    with torch.no_grad():
        yield executor


def define(device, program):
    device.run([protocol.DEFINE, PROGRAM, msgspec.msgpack.encode(program)], 1)


def test_what_a_communicating_command_yields(device):
    body = [
        Reshard(0, 1, 1, (0,), 1, (-1,), Operand(0), "float32"),
        Op("aten.neg.default", [Slot(1)], {}, [2]),
        Reshard(2, 3, 1, (-1,), 1, (0,), Operand(0), "float32"),  # local: not yielded
    ]
    define(device, Program("p", 1, 1, 1, body, [3]))
    device.values[10] = torch.tensor([1.0, 2.0])
    steps = device.run([PROGRAM, 10, 11, [4]], 2)
    transfer, tensor = next(steps)
    assert transfer.group == (0, 1)
    assert transfer.publishes
    assert transfer.shape == (4,)
    assert tensor is device.values[10]
    with pytest.raises(StopIteration):
        steps.send(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert torch.equal(device.values[11], torch.tensor([-1.0, -2.0]))


def test_an_error_thrown_into_a_transfer_fails_the_command(device):
    body = [
        Reshard(0, 1, 1, ("sum",), 1, (-1,), Operand(0), "float32"),
        Reshard(1, 2, 1, (0,), 1, (-1,), Operand(0), "float32"),
    ]
    define(device, Program("p", 1, 1, 1, body, [2]))
    device.values[10] = torch.ones(4)
    steps = device.run([PROGRAM, 10, 11, [4]], 7)
    next(steps)
    transfer, poison = steps.throw(MemoryError("no space"))  # what is left is still taken part in
    assert transfer.group == (0, 1)
    assert poison == Poison((0, 7)) == device.values[11]
    with pytest.raises(StopIteration):
        steps.send(poison)
    assert device.events == [[protocol.FAILED, 0, 7, "MemoryError", "no space", [0], [[4]]]]


def test_import_makes_custom_ops_reachable(device, tmp_path, monkeypatch):
    (tmp_path / "dtorch_test_ops.py").write_text(
        "import torch\n"
        "library = torch.library.Library('dtorch_test_ops', 'DEF')\n"
        "library.define('twice(Tensor x) -> Tensor')\n"
        "library.impl('twice', lambda x: 2 * x, 'CPU')\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    define(device, Program("p", 1, 1, 0, [Op("dtorch_test_ops.twice.default", [Slot(0)], {}, [1])], [1]))
    device.values[10] = torch.ones(2)
    device.run([PROGRAM, 10, 11], 2)
    assert "import the module" in device.events[-1][4]
    device.run([protocol.IMPORT, "dtorch_test_ops"], 3)
    device.run([PROGRAM, 10, 11], 4)
    assert torch.equal(device.values[11], torch.full((2,), 2.0))
    device.run([protocol.IMPORT, "no_such_module_at_all"], 5)
    assert device.events[-1][3] == "ModuleNotFoundError"


def test_defining_again_changes_nothing(device):
    program = Program("p", 1, 1, 0, [Op("aten.neg.default", [Slot(0)], {}, [1])], [1])
    device.values[10] = torch.ones(2)
    for _ in range(2):
        define(device, program)
        device.run([PROGRAM, 10, 11], 2)
    assert torch.equal(device.values[11], -torch.ones(2))


def test_temporaries_die_at_their_last_use(device):
    """The peak of a chain is two tensors, not its length."""
    alive = []
    library = torch.library.Library("dtorch_test_alive", "DEF")
    library.define("next(Tensor x) -> Tensor")

    def step(x):
        y = x + 1

        alive.append(weakref.ref(y))
        step.most = max(step.most, sum(ref() is not None for ref in alive))
        return y

    step.most = 0
    library.impl("next", step, "CPU")
    body = [Op("dtorch_test_alive.next.default", [Slot(n)], {}, [n + 1]) for n in range(10)]
    define(device, Program("p", 1, 1, 0, body, [10]))
    device.values[10] = torch.zeros(2)
    device.run([PROGRAM, 10, 11], 2)
    assert torch.equal(device.values[11], torch.full((2,), 10.0))
    assert step.most <= 2
