"""The harness itself: plain torch passes it everywhere, a faulty stand-in nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from . import adapters, databases, known, memory, rounding, samples, supervise
from .checks import Grid
from .compare import difference, no_worse, stride_difference
from .outcome import Outcome, Tally
from .placements import MESHES, VARIANTS, codes, layouts

CHECKS = ("forward", "no_grad", "inference", "backward", "gradgrad", "inplace", "inplace_backward", "out")
NAMES = (
    "add",
    "mm",
    "cat",
    "sort",
    "nn.functional.dropout",
    "linalg_qr",
    "zeros",
    "nn.BatchNorm1d",
    "nn.LSTM",
    "optim.Adam",
)


def outcomes(engine: str, names: tuple[str, ...] = NAMES) -> list[Outcome]:
    grid = Grid(tuple(MESHES), VARIANTS, CHECKS, sample_limit=1)
    return [found for entry in databases.select(names) for found in entry.run(adapters.make(engine), grid)]


def test_plain_torch_agrees_with_itself() -> None:
    assert {found.status for found in outcomes("plain")} <= {"ok", "skipped"}


def test_every_kind_of_check_is_made() -> None:
    assert {found.check for found in outcomes("plain")} >= {*CHECKS, "train", "eval", "single", "foreach", "fused"}


@pytest.mark.parametrize("name", NAMES)
def test_a_faulty_result_is_reported_as_wrong(name: str) -> None:
    assert {found.status for found in outcomes("faulty", (name,))} == {"wrong"}


def test_an_error_is_recorded_and_the_run_goes_on() -> None:
    class Broken(adapters.PlainAdapter):
        def distribute(self, tensor: torch.Tensor, mesh_shape: tuple[int, ...], codes: object) -> torch.Tensor:
            raise NotImplementedError("no such layout\nsecond line")

    (entry,) = databases.select(("sin",))
    found = list(entry.run(Broken(), Grid(("2",), ("first",), ("forward", "backward"), 2)))
    assert {(one.status, one.detail) for one in found} == {("raised", "NotImplementedError: no such layout")}
    assert len(found) == 2


def test_layouts_differ_and_are_named() -> None:
    tensors = [torch.zeros(4, 5, 6), torch.zeros(6)]
    found = layouts(VARIANTS, tensors, 1)
    assert found[(0,), (0,)] == "first"
    assert found[(1,), (0,)] == "middle"
    assert found[("p",), ("p",)] == "partial"
    assert found[(0,), None] == "plain"
    assert codes("last", 0, torch.zeros(4, 5), 2) == (0, 1)
    assert codes("partial", 0, torch.zeros(4, dtype=torch.int64), 2) == ("r", "r")
    assert codes("first", 0, torch.zeros(()), 2) == ("r", "r")


@pytest.mark.parametrize(
    ("expected", "got", "status"),
    [
        (torch.ones(3), torch.ones(3), None),
        (torch.ones(3), torch.ones(3) + 1e-6, "inexact"),
        (torch.ones(3), torch.ones(3) + 1e-2, "wrong"),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "wrong"),
        (torch.ones(3), torch.ones(1, 3), "wrong"),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), None),
        (torch.tensor(float("inf")), torch.tensor(float("nan")), "wrong"),
        (torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), "wrong"),
        ((torch.ones(2), 3), (torch.ones(2), 3), None),
        ([torch.ones(2), None], [torch.ones(2)], "wrong"),
        ({"a": 1}, {"a": 2}, "wrong"),
        (3, 3.0, "wrong"),
    ],
)
def test_difference(expected: object, got: object, status: str | None) -> None:
    found = difference(expected, got, exact=True)
    assert (found and found[0]) == status


def test_a_rounding_error_as_large_as_torchs_own_is_no_fault() -> None:
    truth, expected = torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([1.25, 2.0])
    assert no_worse((truth, [None]), (expected, [None]), (torch.tensor([0.75, 2.0]), [None]))
    assert not no_worse((truth, [None]), (expected, [None]), (torch.tensor([3.0, 2.0]), [None]))
    assert not no_worse((truth, 1), (expected, 1), (torch.tensor([1.0, 2.0]), 2))


def test_the_addends_of_a_split_sum_are_measured() -> None:
    x = torch.tensor([300.0, 1.0, -300.0, -0.5], dtype=torch.float64)

    def run(index: int, scale: torch.Tensor | None) -> list[torch.Tensor]:
        y = x if scale is None else x * scale
        return [y.sum(), y.max(), y.argmax()]

    whole, largest, index = rounding.allowance(run, [x], (2,), pending=False)
    assert index is None
    torch.testing.assert_close(whole, torch.tensor((301 + 300.5) * 3 / 2, dtype=torch.float64))
    torch.testing.assert_close(largest, torch.tensor(300 * 3 / 2, dtype=torch.float64))


def test_what_jumps_is_no_addend() -> None:
    x = torch.tensor([1.0, 1.0], dtype=torch.float64)
    (first,) = rounding.allowance(
        lambda index, scale: [((x if scale is None else x * scale)[0] >= x[1]).double()], [x], (2,), False
    )
    assert first == 0


@pytest.mark.parametrize(("dtype", "holds"), [(torch.bfloat16, True), (torch.float32, False)])
def test_halves_only_may_be_off_by_the_rounding_of_addends(dtype: torch.dtype, holds: bool) -> None:
    truth, allowed = torch.tensor([0.5], dtype=torch.float64), [torch.tensor([900.0], dtype=torch.float64)]
    expected, off = torch.tensor([0.5], dtype=dtype), torch.tensor([2.5], dtype=dtype)
    assert no_worse([truth], [expected], [off], allowed) == holds
    assert not no_worse([truth], [expected], [off * 10], allowed)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), True),
        (torch.zeros(2, 3), torch.zeros(3, 2).t(), False),
        (torch.zeros(1, 3), torch.zeros(3, 1).t(), True),
        (torch.zeros(0, 3), torch.zeros(3, 0).t(), True),
        ([1, torch.zeros(3).expand(2, 3)], [1, torch.zeros(2, 3)], False),
    ],
)
def test_strides_of_dims_of_one_element_mean_nothing(expected: object, got: object, same: bool) -> None:
    assert (stride_difference(expected, got) is None) == same


def test_samples_are_various_and_the_same_every_time() -> None:
    def shapes() -> list:
        (op,) = [op for op in databases.ops.database() if op.formatted_name == "add"]
        return [[tuple(t.shape) for t in one.tensors()] for one in samples.of_op(op, torch.float32, False, 4)]

    assert shapes() == shapes()
    assert len({tuple(map(len, one)) for one in shapes()}) > 2


def test_results_file_resumes(tmp_path: Path) -> None:
    from . import __main__ as command

    path = tmp_path / "results.jsonl"
    arguments = [
        "--engine",
        "faulty",
        "--ops",
        "sin,cos",
        "--mesh",
        "2",
        "--placements",
        "first",
        "--quiet",
        "--json",
        str(path),
    ]
    assert command.main(arguments) == 1
    assert command.main([*arguments, "--resume"]) == 1
    assert path.read_text().count("started") == 2
    tally = Tally()
    assert tally.load(path) == {"sin", "cos"}
    assert tally.failing("wrong") == ["cos", "sin"]


def test_a_known_failure_needs_a_reason_and_may_not_become_wrong() -> None:
    with pytest.raises(ValueError, match="reason"):
        known.Known("raised", "  ")
    listed = {"sin": known.Known("raised", "no rule")}
    wrong, raised = Outcome("sin", "wrong", "forward"), Outcome("sin", "raised", "forward")
    assert known.unexpected([wrong, raised], listed) == [wrong]
    assert known.load() is not None


def test_a_run_in_processes_reports_what_ends_one(tmp_path: Path) -> None:
    """The stand-in called ``deadly`` ends its process at cos."""
    path = tmp_path / "results.jsonl"
    arguments = [
        "--engine",
        "deadly",
        "--ops",
        "sin,cos,tan",
        "--mesh",
        "2",
        "--placements",
        "first",
        "--checks",
        "forward",
    ]
    tally = supervise.run(1, path, False, arguments)
    assert tally.failing("raised") == ["cos"]
    assert [failure.detail for failure in tally.failures] == ["the process ended with status -9"]
    assert set(tally.counts) == {"sin", "cos", "tan"}


def test_a_process_that_cannot_start_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with status"):
        supervise.run(1, tmp_path / "results.jsonl", False, ["--ops", "nosuchop"])


def test_what_results_share_with_arguments_is_told_apart() -> None:
    class Place(adapters.PlainAdapter):
        def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().clone()

    def shared(function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        return memory.sharing(
            function, torch.inference_mode, samples.Sample((torch.arange(6.0).view(2, 3),), {}), Place()
        )

    functions = [lambda x: x, lambda x: x.view(2, 3), torch.clone, lambda x: x[:1], lambda x: x[1:]]
    kinds = [shared(function) for function in functions]
    for number, kind in enumerate(kinds):
        assert [other for other in range(5) if difference(kind, kinds[other], exact=True) is None] == [number]
