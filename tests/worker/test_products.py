"""Products that are computed where others read them: which ones, the same bits, and right whatever becomes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch.engine import protocol
from dtorch.placement import REPLICATE as R
from dtorch.placement import PlacementList, shard
from dtorch.program.ir import Op, Operand, Program, Rearrange, Reshard, ReshardDone, ReshardStart, Roles, Slot
from dtorch.worker import products
from dtorch.worker.comm import all_reduce
from dtorch.worker.comm.shared import SharedMemory
from dtorch.worker.executor import Executor
from dtorch.worker.loop import _drive
from dtorch.worker.poison import Poison

from .test_comm import LINE, run_forked, split, whole

SUM, ALL, ROWS = ("sum",), (-1,), (0,)
PROGRAM = protocol.FIRST_PROGRAM


def op(name: str, *args: Any, out: int) -> Op:
    return Op(f"aten.{name}", [Slot(arg) if isinstance(arg, int) else arg for arg in args], {}, [out])


def move(source: int, out: int, before: tuple = SUM, after: tuple = ALL) -> Reshard:
    return Reshard(source, out, 1, before, 1, after, Operand(0), "float32")


def rearranged(source: int, out: int) -> Rearrange:
    return Rearrange(source, out, 1, "query", False, SUM, Roles((), (), ()), False, Operand(0), "float32")


MM = op("mm.default", 0, 1, out=2)


@pytest.mark.parametrize(
    ("body", "outputs", "expected"),
    [
        ([MM, move(2, 3)], [3], {0}),
        ([MM, op("t.default", 2, out=3), move(3, 4)], [4], {0}),
        ([MM, op("relu.default", 2, out=3), move(2, 4)], [3, 4], {0}),
        ([MM, ReshardStart(move(2, 3)), op("relu.default", 0, out=4), ReshardDone(move(2, 3))], [3, 4], {0}),
        ([MM, op("relu.default", 2, out=3), move(3, 4)], [4], set()),
        ([MM, move(2, 3), op("relu.default", 2, out=4)], [3, 4], set()),
        ([MM, op("t.default", 2, out=3), move(2, 4), op("relu.default", 3, out=5)], [4, 5], set()),
        ([MM, op("t.default", 2, out=3), move(2, 4)], [3, 4], set()),
        ([MM, move(2, 3)], [2, 3], set()),
        ([MM, move(2, 3), move(2, 4, SUM, ROWS)], [3, 4], set()),
        ([MM, move(2, 3), op("add_.Tensor", 3, 2, out=4)], [4], set()),
        ([MM, rearranged(2, 3)], [3], set()),
        ([MM, rearranged(2, 3), move(2, 4)], [3, 4], set()),
        ([move(0, 2), op("mm.default", 2, 1, out=3)], [3], set()),
        ([MM], [2], set()),
    ],
)
def test_what_is_moved_and_not_looked_at_again(body: list, outputs: list[int], expected: set[int]) -> None:
    assert products.moved_away(Program("p", 1, 2, 1, body, outputs)) == expected


ARGUMENTS: dict[str, list[tuple[tuple[int, ...], ...]]] = {
    "aten.mm.default": [((37, 19), (19, 23)), ((1, 64), (64, 50)), ((5, 0), (0, 4)), ((0, 3), (3, 4))],
    "aten.bmm.default": [((3, 7, 9), (3, 9, 5)), ((0, 7, 9), (0, 9, 5))],
    "aten.addmm.default": [((23,), (37, 19), (19, 23)), ((37, 23), (37, 19), (19, 23)), ((), (5, 0), (0, 4))],
    "aten.linear.default": [
        ((37, 19), (23, 19)), ((2, 5, 64), (30, 64)), ((2, 5, 64), (30, 64), (30,)), ((7,), (3, 7)), ((7,), (7,)),
        ((4, 0), (3, 0)), ((0, 5), (3, 5), (3,)), ((37, 19), (23, 19), (23,)),
    ],
    "aten.matmul.default": [
        ((37, 19), (19, 23)), ((2, 5, 64), (64, 30)), ((2, 3, 5, 64), (64, 30)), ((7,), (7, 3)), ((5, 7), (7,)), ((2, 5, 64), (2, 64, 30)),
        ((4, 0), (0, 3)), ((0, 5), (5, 3)),
    ],
    "aten.tensordot.default": [
        ((37, 19), (37, 23)), ((2, 5, 64), (2, 5, 30)), ((2, 3, 5, 64), (2, 3, 5, 30)), ((7,), (7,)), ((0, 4), (0, 3)), ((1, 4), (5, 3)),
    ],
}  # fmt: skip
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int8, torch.uint8,
)  # fmt: skip


def strange(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, transposed in memory, conjugated or negated when they are read."""
    if tensor.ndim > 1:
        tensor = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() else torch._neg_view(tensor.neg())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", products.PRODUCTS)
def test_the_bits_are_the_ops(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_BYTES", 0)
    plain = functools.reduce(getattr, name.split("."), torch.ops)
    made: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = torch.empty(shape, dtype=dtype).view(torch.uint8) if shape and 0 not in shape else torch.empty(0)
        made.append(memory.fill_(255).view(dtype).view(shape))  # not a number
        return made[-1]

    computed = products.computed_into(name, plain, empty)
    for shapes in ARGUMENTS[name]:
        args = [whole(shape, dtype, seed) / (3 if dtype.is_floating_point else 1) for seed, shape in enumerate(shapes)]
        dims = [list(range(len(shapes[0]) - 1))] * 2 if "tensordot" in name else []
        for given in [arg.to(dtype) for arg in args], [strange(arg.to(dtype)) for arg in args]:
            expected, found = plain(*given, *dims), computed(*given, *dims)
            assert torch.equal(found, expected), (name, shapes)
            assert found.dtype is expected.dtype
            assert found.stride() == expected.stride() or not found.numel()
    assert made


def test_numbers_of_an_addmm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_BYTES", 0)
    args = [torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)]
    computed = products.computed_into(
        "aten.addmm.default", torch.addmm, lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )
    assert torch.equal(computed(*args, beta=2, alpha=0.5), torch.addmm(*args, beta=2, alpha=0.5))


def test_an_illegal_product_says_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_BYTES", 0)
    computed = products.computed_into("aten.mm.default", torch.mm, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    ones = torch.ones(2, 3)
    for left, right in (ones, torch.ones(4, 5)), (ones, torch.ones(3)), (ones, torch.ones(3, 4, dtype=torch.int64)):
        with pytest.raises(RuntimeError) as told:
            torch.mm(left, right)
        with pytest.raises(RuntimeError) as found:
            computed(left, right)
        assert str(found.value) == str(told.value)


class Device:
    """An executor with a communicator, as a worker has."""

    def __init__(self, device: int, communicator: SharedMemory, program: Program) -> None:
        self.events: list[list] = []
        self.made = 0
        self.communicator = communicator
        self.executor = Executor(device, self.events.append, None, empty=self._empty)  # type: ignore[arg-type]
        self.executor.add_mesh(1, LINE)
        self.executor.define(PROGRAM, program)
        self._sequence = 0

    def _empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        self.made += 1
        return self.communicator.empty(shape, dtype)

    def run(self, shape: tuple[int, ...], *inputs: torch.Tensor | Poison) -> torch.Tensor | Poison:
        """The program's one output."""
        values = self.executor.values
        values.update(enumerate(inputs))
        self._sequence += 1
        steps = self.executor.run([PROGRAM, *range(len(inputs)), 99, list(shape)], self._sequence)
        if steps is not None:
            _drive(steps, self.communicator, self._sequence)  # type: ignore[arg-type]
        return values.pop(99)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of all sizes are computed so, and added up in shares from 1 KB on."""
    monkeypatch.setattr(products, "LEAST_BYTES", 1)
    monkeypatch.setattr(all_reduce, "_SHARED_OUT", (1 << 10, 1 << 10))


def product(target: tuple, dtype: torch.dtype, *views: tuple[str, Callable], halves: bool = False) -> Program:
    """``mm`` along a split dim, ``views`` of it, and what completes it; then it is doubled."""
    body: list[Any] = [MM]
    slot = 2
    for name, _ in views:
        body.append(op(name, slot, out=slot + 1))
        slot += 1
    moved = Reshard(slot, slot + 1, 1, SUM, 1, target, Operand(0), str(dtype).removeprefix("torch."))
    body += [ReshardStart(moved), ReshardDone(moved)] if halves else [moved]
    body.append(op("add.Tensor", slot + 1, slot + 1, out=slot + 2))
    return Program("p", 1, 2, 1, body, [slot + 2])


TURNED = "t.default", torch.t
CONJ = "_conj.default", torch.conj
NEGATED = "_neg_view.default", torch.neg
SHAPES = [(40, 33, 50), (2, 4, 600), (3, 5, 7), (0, 3, 2), (4, 2, 5)]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("limit", [None, 1 << 16], ids=["any arena", "a small arena"])
@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
def test_what_a_program_makes_of_them(limit: int | None, halves: bool) -> None:
    """Split along a dim of uneven parts, some of them empty, all reduced or scattered, also through views; and again and again."""

    def work(device: int, communicator: SharedMemory) -> None:
        taken = (
            communicator._arena.tensor((1 << 12,), torch.float32) if device == 1 else None
        )  # less room than the others have
        for dtype in (torch.float32, torch.float16, torch.complex64, torch.int64):
            for views in (), (TURNED,), (TURNED, TURNED), (CONJ,), (NEGATED,), (CONJ, NEGATED):
                if CONJ in views and not dtype.is_complex:
                    continue
                for target in ALL, ROWS:
                    worker = Device(device, communicator, product(target, dtype, *views, halves=halves))
                    held = []
                    for seed, (rows, inner, columns) in enumerate(2 * SHAPES):
                        left, right = whole((rows, inner), dtype, seed), whole((inner, columns), dtype, seed + 50)
                        own = [
                            split(LINE, PlacementList(placements), tensor, device)
                            for placements, tensor in (([shard(1)], left), ([shard(0)], right))
                        ]
                        expected = left @ right
                        for _, view in views:
                            expected = view(expected)
                        shape = tuple(expected.shape)
                        expected = split(LINE, PlacementList([R if target == ALL else shard(0)]), 2 * expected, device)
                        held.append((worker.run(shape, *own), expected))  # type: ignore[arg-type]
                        assert not worker.events
                    assert worker.made
                    assert all(torch.equal(found, expected) for found, expected in held), (dtype, target)
        held.clear()
        del worker, taken
        communicator._sent.await_readers(len(communicator._sent.waiting))
        assert not communicator._sent._made_here

    run_forked([0, 1, 2], work, limit)


@pytest.mark.usefixtures("always")
def test_the_sum_is_made_where_the_product_was() -> None:
    body = [MM, move(2, 3)]

    def work(device: int, communicator: SharedMemory) -> None:
        worker = Device(device, communicator, Program("p", 1, 2, 1, body, [3]))
        first = worker.run((64, 64), torch.ones(64, 4), torch.ones(4, 64))
        place = communicator._sent.arena._sizes
        assert len(place) == 1  # nothing was copied in
        second = worker.run((64, 64), torch.ones(64, 4), torch.full((4, 64), 2.0))
        assert torch.equal(first, torch.full((64, 64), 12.0))  # a result stays what it is
        assert torch.equal(second, torch.full((64, 64), 24.0))

    run_forked([0, 1, 2], work)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("target", [ALL, ROWS], ids=["all-reduce", "reduce-scatter"])
def test_failures_travel(target: tuple) -> None:
    """Of what is multiplied, and of a product that one device cannot make."""
    poison = Poison((1, 77))
    body = [MM, move(2, 3, SUM, target)]

    def work(device: int, communicator: SharedMemory) -> None:
        worker = Device(device, communicator, Program("p", 1, 2, 1, body, [3]))
        left, right = torch.ones(64, 4), torch.ones(4, 64)
        right_total = split(LINE, PlacementList([R if target == ALL else shard(0)]), torch.full((64, 64), 12.0), device)
        for _ in range(3):
            assert worker.run((64, 64), poison if device == 1 else left, right) == poison
            assert torch.equal(worker.run((64, 64), left, right), right_total)  # type: ignore[arg-type]
            found = worker.run((64, 64), left, torch.ones(5, 64) if device == 2 else right)
            assert isinstance(found, Poison)
            assert found.origin[0] == 2
        assert len(worker.events) == (3 if device == 2 else 0)

    run_forked([0, 1, 2], work)


@pytest.mark.usefixtures("always")
def test_a_product_that_is_gathered() -> None:
    body = [MM, move(2, 3, ROWS, ALL)]

    def work(device: int, communicator: SharedMemory) -> None:
        worker = Device(device, communicator, Program("p", 1, 2, 1, body, [3]))
        for seed, rows in enumerate((64, 65, 2, 1)):
            left, right = whole((rows, 9), torch.float32, seed), whole((9, 30), torch.float32, seed)
            own = split(LINE, PlacementList([shard(0)]), left, device)
            assert torch.equal(worker.run((rows, 30), own, right), left @ right)  # type: ignore[arg-type]
        assert worker.made

    run_forked([0, 1, 2], work)


def test_a_program_on_workers(engine: str) -> None:
    """Large enough for the real limit."""
    mesh = dtorch.DeviceMesh("cpu", [0, 1], ("x",))
    generator = torch.Generator().manual_seed(0)
    left = torch.randint(-4, 4, (1024, 8), generator=generator).float()
    right = torch.randint(-4, 4, (8, 2050), generator=generator).float()
    a = dtorch.distribute_tensor(left, mesh, [dtorch.Shard(1)])
    b = dtorch.distribute_tensor(right, mesh, [dtorch.Shard(0)])

    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        return [(a @ b).redistribute(placements=[placement]) for placement in (dtorch.Replicate(), dtorch.Shard(0))]  # type: ignore[call-arg]

    compiled = dtorch.compile(function)
    kept = [compiled(a, b) for _ in range(3)]
    double = compiled(a + a, b)
    for found in kept:
        assert all(torch.equal(one.to_torch(), left @ right) for one in found)
    assert all(torch.equal(one.to_torch(), 2 * left @ right) for one in double)
