"""The simulation runs the wire protocol's commands, one after the other, on as many devices as one likes."""

from __future__ import annotations

import msgspec
import pytest
import torch

from dtorch.engine import protocol
from dtorch.engine.simulate import SimulatedEngine
from dtorch.errors import DeviceUnavailable
from dtorch.program.ir import Const, Layout, Local, LocalShape, Op, Operand, Program, Reshard, Slot
from dtorch.raw import dtype_name

MESH, SECOND = 1, 2


class Bench:
    """An engine, the events it sent, and short ways to say commands."""

    def __init__(self, *shape, **settings):
        self.events = []
        self.engine = SimulatedEngine(self.events.append, lambda error: None, **settings)
        self.tokens = 0
        self.programs = protocol.FIRST_PROGRAM
        self.shapes = {}
        if shape:
            self.mesh(MESH, shape)

    def mesh(self, mesh, shape, ids=None):
        ids = ids if ids is not None else list(range(torch.Size(shape).numel()))
        self.engine.ensure("cpu", ids)
        self.send([protocol.MESH, mesh, "cpu", list(shape), ids, None])

    def send(self, *commands):
        self.engine.send(list(commands))

    def put(self, value, tensor, placements, mesh=MESH):
        self.shapes[value] = list(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        command = [protocol.PUT, value, mesh, list(placements), list(tensor.shape), dtype]
        self.engine.stage(tensor.contiguous(), (), lambda blob, now: self.send([*command, blob]))

    def define(self, program):
        self.programs += 1
        self.send([protocol.DEFINE, self.programs, msgspec.msgpack.encode(program)])
        return self.programs

    def op(self, name, *args, inputs, outs=(0,), operands=0, orders=(), **kwargs):
        """A program of one op; ``args`` are written as in the IR."""
        slots = [inputs + out if out >= 0 else -1 for out in outs]
        body = [Op(name, list(args), kwargs, slots, list(orders))]
        return self.define(Program(name, MESH, inputs, operands, body, [s for s in slots if s >= 0]))

    def ask(self, kind, *rest):
        self.tokens += 1
        before = len(self.events)
        self.send([kind, self.tokens, *rest])
        return self.events[before:]

    def get(self, value, placements, shape, dtype=torch.float32, mesh=MESH):
        """The whole tensor, through a landing."""
        shape = torch.Size(shape)
        landing = self.engine.landing(shape.numel() * dtype.itemsize)
        events = self.ask(protocol.GET, value, mesh, list(placements), list(shape), dtype_name(dtype), landing)
        assert all(event[0] == protocol.REPLY and event[3] is None for event in events), events
        return self.engine.landed(landing, shape, dtype)

    def shards(self, value, mesh=MESH):
        found = {}
        for kind, device, _, payload in self.ask(protocol.SHARDS, value, mesh):
            if kind == protocol.POISONED:
                found[device] = payload
                continue
            shape, dtype, raw = payload
            dtype = getattr(torch, dtype)
            flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            found[device] = flat.view(shape)
        return found


@pytest.fixture
def bench():
    made = []

    def make(*shape, **settings):
        made.append(Bench(*shape, **settings))
        return made[-1]

    yield make
    for one in made:
        one.engine.close()


def reshard(source, out, before, after, shape=0, source_mesh=MESH, target_mesh=MESH, dtype="float32", order=None):
    return Reshard(source, out, source_mesh, tuple(before), target_mesh, tuple(after), Operand(shape), dtype, order)


DTYPES = (torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.int8, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("placements", [[0], [1], [-1]])
def test_put_and_get(bench, dtype, placements):
    b = bench(3)
    x = torch.arange(20).view(5, 4).to(dtype)
    kept = x.clone()
    b.put(10, x, placements)
    x.zero_()  # the client's bytes are not aliased
    assert torch.equal(b.get(10, placements, (5, 4), dtype), kept)
    ((_, device, _, payload),) = (
        b.ask(protocol.GET, 10, MESH, [-1], [5, 4], dtype_name(dtype), None) if placements == [-1] else [(0, 0, 0, 0)]
    )
    if placements == [-1]:
        assert device == 0
        assert torch.equal(torch.frombuffer(bytearray(payload), dtype=dtype).view(5, 4), kept)


def test_put_partial_keeps_it_once(bench):
    b = bench(3)
    x = torch.randn(4)
    b.put(10, x, ["sum"])
    shards = b.shards(10)
    assert torch.equal(shards[0], x)
    assert not shards[1].any()
    assert not shards[2].any()


def test_scalars_and_empty_tensors(bench):
    b = bench(2)
    b.put(10, torch.tensor(3.5), [-1])
    assert b.get(10, [-1], ()).item() == 3.5
    b.put(11, torch.empty(0, 4), [0])
    assert b.get(11, [0], (0, 4)).shape == (0, 4)


def test_an_op_and_its_operands(bench):
    b = bench(2)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    b.put(10, x, [0])
    b.put(11, y, [0])
    add = b.op("aten.add.Tensor", Slot(0), Slot(1), inputs=2, operands=1, alpha=Operand(0))
    b.send([add, 10, 11, 12, 2], [add, 12, 10, 13, 1])
    assert torch.equal(b.get(12, [0], (4, 3)), x + 2 * y)
    assert torch.equal(b.get(13, [0], (4, 3)), x + 2 * y + x)


def test_ops_of_several_and_listed_results(bench):
    b = bench(2)
    x = torch.randn(4, 6)
    b.put(10, x, [0])
    split = b.op("aten.split.Tensor", Slot(0), Operand(0), Operand(1), inputs=1, outs=(0, -1, 1), operands=2)
    b.send([split, 10, 20, 21, 2, 1])
    assert torch.equal(b.get(21, [0], (4, 2)), x[:, 4:])
    top = b.op("aten.max.dim", Slot(0), Operand(0), inputs=1, outs=(0, 1), operands=1)
    b.send([top, 10, 30, 31, 1])
    assert torch.equal(b.get(30, [0], (4,)), x.max(1).values)
    assert torch.equal(b.get(31, [0], (4,), torch.int64), x.max(1).indices)


def test_constants_and_local_shapes(bench):
    b = bench(3)
    zeros = b.op(
        "aten.full.default",
        LocalShape(Operand(0), (0,)),
        float("inf"),
        inputs=0,
        operands=1,
        dtype=Const("dtype", "float64"),
        device=Const("device", ""),
    )
    b.send([zeros, 10, [7, 2]])
    assert {d: tuple(s.shape) for d, s in b.shards(10).items()} == {0: (3, 2), 1: (3, 2), 2: (1, 2)}
    assert torch.equal(b.get(10, [0], (7, 2), torch.float64), torch.full((7, 2), float("inf"), dtype=torch.float64))


@pytest.mark.parametrize(("before", "after"), [([0], [-1]), ([0], [1]), (["sum"], [-1]), (["sum"], [0]), ([-1], [0])])
def test_reshard(bench, before, after):
    b = bench(4)
    x = torch.randn(50, 60)
    b.put(10, x, before)
    move = b.define(Program("move", MESH, 1, 1, [reshard(0, 1, before, after)], [1]))
    b.send([move, 10, 11, [50, 60]])
    assert torch.equal(b.get(11, after, (50, 60)), x)
    assert torch.equal(b.get(10, [-1] if before == ["sum"] else before, (50, 60)), x)


def test_reshard_never_aliases_and_keeps_an_order(bench):
    b = bench(2)
    x = torch.randn(4, 6)
    b.put(10, x, [-1])
    same = b.define(Program("same", MESH, 1, 1, [reshard(0, 1, [-1], [-1], order=[1, 0])], [1]))
    double = b.op("aten.mul_.Tensor", Slot(0), Operand(0), inputs=1, outs=(-1,), operands=1)
    b.send([same, 10, 11, [4, 6]], [double, 10, 2])
    assert torch.equal(b.get(11, [-1], (4, 6)), x)
    assert b.ask(protocol.DESCRIBE, MESH, 11)[0][3] == [[[4, 6], [1, 4], "float32"]]


def test_between_meshes(bench):
    b = bench(2)
    b.mesh(SECOND, (2, 2), [5, 4, 3, 1])
    x = torch.randn(8, 6)
    b.put(10, x, [0])
    move = b.define(Program("move", MESH, 1, 1, [reshard(0, 1, [0], [1, 0], target_mesh=SECOND)], [1]))
    b.send([move, 10, 11, [8, 6]])
    assert torch.equal(b.get(11, [1, 0], (8, 6), mesh=SECOND), x)


def test_a_program_of_many_instructions(bench):
    """Two tensor-parallel layers: column-wise, row-wise, all-reduce."""
    b = bench(2)
    x, up, down = torch.randn(5, 8), torch.randn(8, 12), torch.randn(12, 8)
    b.put(10, x, [-1])
    b.put(11, up, [1])
    b.put(12, down, [0])
    body = [
        Op("aten.mm.default", [Slot(0), Slot(1)], {}, [3]),
        Op("aten.relu.default", [Slot(3)], {}, [4]),
        Op("aten.mm.default", [Slot(4), Slot(2)], {}, [5]),
        reshard(5, 6, ["sum"], [-1]),
        Op("aten.add.Tensor", [Slot(6), Slot(0)], {}, [7]),
    ]
    block = b.define(Program("block", MESH, 3, 1, body, [7]))
    for out in (20, 21):
        b.send([block, 10, 11, 12, out, [5, 8]])
        torch.testing.assert_close(b.get(out, [-1], (5, 8)), (x @ up).relu() @ down + x)
    assert b.ask(protocol.STATS, False)[0][3]["values"] == 5


def test_results_take_the_order_the_program_states(bench):
    b = bench(2)
    x = torch.randn(4, 6)
    b.put(10, x, [-1])
    clone = b.op("aten.clone.default", Slot(0), inputs=1, orders=([1, 0],))
    for out in (11, 12):
        b.send([clone, 10, out])
        assert b.ask(protocol.DESCRIBE, MESH, out)[0][3] == [[[4, 6], [1, 4], "float32"]]
        assert torch.equal(b.get(out, [-1], (4, 6)), x)
    # A first run that is too small to tell does not settle it.
    b.put(13, torch.randn(1, 6), [-1])
    clone = b.op("aten.clone.default", Slot(0), inputs=1, orders=([1, 0],))
    b.send([clone, 13, 14], [clone, 10, 15])
    assert b.ask(protocol.DESCRIBE, MESH, 15)[0][3] == [[[4, 6], [1, 4], "float32"]]


def test_views_alias(bench):
    b = bench(2)
    x = torch.randn(4, 6)
    b.put(10, x, [0])
    transpose = b.op("aten.t.default", Slot(0), inputs=1, orders=([0, 1],))
    double = b.op("aten.mul_.Tensor", Slot(0), Operand(0), inputs=1, outs=(0,), operands=1)
    b.send([transpose, 10, 11], [double, 11, 12, 2])
    assert torch.equal(b.get(10, [0], (4, 6)), 2 * x)
    assert torch.equal(b.get(12, [1], (6, 4)), 2 * x.t())


# Errors


def failures(b):
    return [event for event in b.events if event[0] == protocol.FAILED]


def test_a_failure_poisons_what_depends_on_it(bench):
    b = bench(2)
    b.put(10, torch.randn(4, 6), [0])
    mm = b.op("aten.mm.default", Slot(0), Slot(1), inputs=2)
    b.send([mm, 10, 10, 11], [mm, 11, 10, 12], [mm, 10, 12, 13])
    first, second = failures(b)
    assert first[:2] == [protocol.FAILED, 0]
    assert second[:2] == [protocol.FAILED, 1]
    sequence, name, message, coordinate, shapes = first[2:]
    assert (name, coordinate, shapes) == ("RuntimeError", [0], [[2, 6], [2, 6]])
    assert "mat1 and mat2" in message
    for value in (11, 12, 13):
        events = b.ask(protocol.GET, value, MESH, [-1], [4, 6], "float32", None)
        assert [event[:2] + event[3:] for event in events] == [[protocol.POISONED, 0, (0, sequence)]]
    assert b.ask(protocol.DESCRIBE, MESH, 10)[0][0] == protocol.REPLY


def test_a_device_that_failed_still_comes_to_every_transfer(bench):
    b = bench(3)
    x = torch.arange(12.0).view(3, 4)
    b.put(10, x, [0])
    index = torch.tensor([0, 9, 0])  # out of range on device 1 only
    b.put(11, index, [0])
    body = [
        reshard(0, 2, [0], [-1]),
        Op("aten.index_select.default", [Slot(0), 1, Slot(1)], {}, [3]),
        reshard(3, 4, [0], [-1], shape=1),
        reshard(2, 5, [-1], [0]),
        reshard(5, 6, [0], [1]),
    ]
    program = b.define(Program("p", MESH, 2, 2, body, [4, 6]))
    b.send([program, 10, 11, 20, 21, [3, 4], [3, 1]])
    (failure,) = failures(b)
    assert failure[1] == 1
    assert "out of DATA bounds" in failure[4]
    assert all(found == (1, failure[2]) for found in b.shards(20).values())
    assert torch.equal(b.get(10, [0], (3, 4)), x)
    # A poisoned input does the same without a word.
    b.send([program, 10, 20, 22, 23, [3, 4], [3, 1]])
    assert len(failures(b)) == 1
    assert all(found == (1, failure[2]) for found in b.shards(22).values())


def test_a_failed_write_poisons_every_alias(bench):
    b = bench(2)
    b.put(10, torch.randn(4, 6), [-1])
    b.put(12, torch.randn(5), [-1])
    view = b.op("aten.select.int", Slot(0), 0, 1, inputs=1)
    add_ = b.op("aten.add_.Tensor", Slot(0), Slot(1), inputs=2)
    copy_ = b.op("aten.copy_.default", Slot(0), Slot(1), inputs=2, outs=(-1,))
    b.send([view, 10, 11], [view, 10, 13], [add_, 11, 12, 14])
    for value in (10, 11, 13, 14):
        assert all(isinstance(found, tuple) for found in b.shards(value).values())
    # So does a write of a poison, though it never ran.
    b.put(20, torch.randn(4, 6), [-1])
    b.send([view, 20, 21], [copy_, 21, 11])
    assert all(isinstance(found, tuple) for found in b.shards(20).values())
    assert len(failures(b)) == 2
    assert torch.is_tensor(b.shards(12)[0])


def test_lists_and_device_functions_see_poison(bench):
    b = bench(2)
    b.put(10, torch.randn(4), [0])
    bad = b.op("aten.mm.default", Slot(0), Slot(0), inputs=1)
    cat = b.op("aten.cat.default", [Slot(0), Slot(1)], inputs=2)
    body = [Local("dtorch.slice_write", [Slot(0), Slot(1), 0, 0, 0, 1], {}, [], [Layout((0,), Operand(0))])]
    write = b.define(Program("w", MESH, 2, 1, body, []))
    b.send([bad, 10, 11], [cat, 10, 11, 12], [write, 10, 11, [4]])
    assert len(failures(b)) == 2
    for value in (11, 12, 10):
        assert all(isinstance(found, tuple) for found in b.shards(value).values())


def test_unknown_and_forbidden_ops_fail(bench):
    b = bench(1)
    b.put(10, torch.randn(4), [0])
    for name in ("aten.no_such_thing.default", "os.system.default", "profiler._record_function_enter.default", "aten"):
        program = b.op(name, Slot(0), inputs=1)
        b.send([program, 10, 11])
        assert failures(b)[-1][3] == "ValueError"


def test_a_missing_value_fails(bench):
    b = bench(1)
    neg = b.op("aten.neg.default", Slot(0), inputs=1)
    b.send([neg, 99, 11])
    assert failures(b)[-1][4] == "value 99 is not in the store"
    assert b.ask(protocol.GET, 98, MESH, [-1], [4], "float32", None)[-1][0] == protocol.POISONED


def test_the_callers_modes_do_not_reach_the_workers(bench):
    b = bench(2)
    with torch.inference_mode(), torch.autocast("cpu"):
        b.put(10, torch.randn(4, 4), [-1])
        mm = b.op("aten.mm.default", Slot(0), Slot(0), inputs=1)
        b.send([mm, 10, 11])
    assert b.ask(protocol.DESCRIBE, MESH, 11)[0][3][0][2] == "float32"


def test_stats_count_storages_once(bench):
    b = bench(2)
    b.put(10, torch.randn(8, 4), [0])
    view = b.op("aten.t.default", Slot(0), inputs=1)
    b.send([view, 10, 11])
    stats = {event[1]: event[3] for event in b.ask(protocol.STATS, True)}
    assert stats[0] == {"live": 64, "peak": 64, "values": 2}
    b.send([protocol.FREE, 10, 11])
    assert b.ask(protocol.STATS, False)[0][3] == {"live": 0, "peak": 64, "values": 0}


def test_devices_of_another_mesh_skip_a_program(bench):
    b = bench(2)
    b.mesh(SECOND, (2,), [7, 8])
    b.put(10, torch.randn(4), [0])
    neg = b.op("aten.neg.default", Slot(0), inputs=1)
    b.send([neg, 10, 11])
    assert [event[1] for event in b.ask(protocol.SYNC)] == [0, 1, 7, 8]
    assert not failures(b)


def test_432_devices(bench):
    b = bench(54, 8)
    x = torch.randn(108, 16)
    b.put(10, x, [0, 1])
    mul = b.op("aten.mul.Tensor", Slot(0), Slot(0), inputs=1)
    gather = b.define(Program("g", MESH, 1, 1, [reshard(0, 1, [0, 1], [-1, -1])], [1]))
    b.send([mul, 10, 11], [gather, 11, 12, [108, 16]])
    assert torch.equal(b.get(12, [-1, -1], (108, 16)), x * x)


def test_only_cpu(bench):
    with pytest.raises(DeviceUnavailable, match="only cpu"):
        bench().engine.ensure("cuda", [0])
