"""What cannot be a pipeline is an error at the call, which says what was given and what is legal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dtorch
from dtorch import nn, pipeline
from dtorch.errors import MeshMismatch
from dtorch.pipeline import Step, gpipe, one_f_one_b, stage_backward, stage_input, to_stage

pytestmark = pytest.mark.usefixtures("simulated")

FIRST, SECOND = dtorch.init_device_mesh("cpu", (2, 2), ("pp", "tp")).unbind("pp")


@pytest.fixture
def given() -> SimpleNamespace:
    stages = [nn.Linear(4, 4, device_mesh=mesh) for mesh in (FIRST, SECOND)]
    xs, ys = ([dtorch.ones(2, 4, device_mesh=mesh)] for mesh in (FIRST, SECOND))
    return SimpleNamespace(stages=stages, xs=xs, ys=ys, loss=nn.functional.mse_loss)


def run(g: SimpleNamespace, steps: Any = None, **changed: Any) -> Any:
    g = SimpleNamespace(**{**vars(g), **changed})
    return pipeline.run(one_f_one_b(2, 1) if steps is None else steps, g.stages, g.xs, g.ys, g.loss)


def mixed() -> torch.nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device_mesh=SECOND))


BOTH = r"\[0, 1\].*\[2, 3\]"
CASES: dict[str, tuple[Any, type[Exception], str]] = {
    "no stages": (lambda g: run(g, stages=[]), ValueError, "no stages"),
    "stage without layers": (
        lambda g: run(g, stages=[g.stages[0], nn.Sequential()]),
        ValueError,
        r"stages\[1\]: a stage without layers: Sequential\(\) has no parameters.*assign_layers_to_stages",
    ),
    "a stage is no module": (lambda g: run(g, stages=[torch.tanh, g.stages[1]]), TypeError, r"stages\[0\].*Module.*builtin"),
    "more stages than layers": (lambda g: dtorch.assign_layers_to_stages(1, 2), ValueError, "2 stages need as many layers, got 1"),
    "plain and placed": (lambda g: run(g, stages=[g.stages[0], mixed()]), ValueError, "plain parameters.*'0.weight'.*'1.weight'"),
    "one stage, two meshes": (lambda g: to_stage(g.xs[0], nn.Sequential(*g.stages)), MeshMismatch, f"'0.weight' on .*{BOTH}"),
    "counts": (lambda g: run(g, ys=[]), ValueError, "1 inputs and 0 targets"),
    "a tensor of inputs": (lambda g: run(g, xs=g.xs[0]), TypeError, r"inputs must be a list.*x\.chunk"),
    "a tensor of targets": (lambda g: run(g, ys=g.ys[0]), TypeError, r"targets must be a list.*x\.chunk"),
    "left out": (lambda g: run(g, xs=g.xs * 3, ys=g.ys * 3), ValueError, r"leave out micro-batches \[1, 2\] of 3"),
    "kind": (lambda g: run(g, [Step("sideways", 0, 0)]), ValueError, "'forward', .*got 'sideways'"),
    "no such stage": (lambda g: run(g, one_f_one_b(3, 1)), ValueError, r"Step\(kind='send_forward', stage=1.*2 stages"),
    "no such micro-batch": (lambda g: run(g, gpipe(2, 2)), ValueError, "micro_batch=1.*1 micro-batches"),
    "negative stage": (lambda g: run(g, [Step("forward", -1, 0)]), ValueError, "no such stage"),
    "order": (lambda g: run(g, [Step("forward", 1, 0)]), ValueError, "a step that it needs has not been run"),
    "backward too early": (lambda g: run(g, [Step("backward", 1, 0)]), ValueError, "has not been run"),
    "twice": (lambda g: run(g, [*one_f_one_b(2, 1), Step("backward", 1, 0)]), ValueError, "used up"),
    "micro-batches": (lambda g: list(gpipe(2, 0)), ValueError, "num_micro_batches must be at least 1, got 0"),
    "stages": (lambda g: list(one_f_one_b(True, 1)), TypeError, "'num_stages' must be int, not bool"),
    "input of no tensor": (lambda g: stage_input([1], g.stages[0]), TypeError, "'x' must be a tensor, not list"),
    "to_stage of no tensor": (lambda g: to_stage(None, g.stages[0]), TypeError, "'x' must be a tensor, not NoneType"),
    "output of no tensor": (lambda g: stage_backward(None), TypeError, "'output' must be a tensor, not NoneType"),
    "grad of no tensor": (lambda g: stage_backward(g.xs[0], 1.0), TypeError, "'grad' must be a tensor, not float"),
    "no loss": (lambda g: stage_backward(g.stages[0](g.xs[0])), ValueError, r"'grad' is needed for an output of shape \(2, 4\)"),
    "shape of grad": (
        lambda g: stage_backward(g.stages[0](g.xs[0]), g.xs[0][0]), ValueError, r"grad has shape \(4,\).*output.*\(2, 4\)",
    ),
    "input is no leaf": (
        lambda g: stage_backward(g.xs[0].sum(), input=g.stages[0](g.xs[0])), ValueError, "input must be a leaf.*stage_input",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_error_at_the_call(given: SimpleNamespace, case: str) -> None:
    call, kind, text = CASES[case]
    with pytest.raises(kind, match=f"(?s){text}"):
        call(given)


WRONG_STAGE = {
    "input": (lambda g: run(g, xs=g.ys), r"inputs\[0\] is on .*\[2, 3\].*stage 0.*\[0, 1\]"),
    "target": (lambda g: run(g, ys=g.xs), r"targets\[0\] is on .*\[0, 1\].*stage 1.*\[2, 3\]"),
    "gradient": (lambda g: stage_backward(g.stages[0](g.xs[0]), g.ys[0]), r"grad is on .*\[2, 3\].*output on .*\[0, 1\]"),
    "activation": (lambda g: g.stages[1](g.stages[0](g.xs[0])), r"linear.*\[0, 1\].*\[2, 3\]"),
    "attention": (lambda g: attention(g), r"scaled_dot_product.*\[0, 1\].*\[2, 3\]"),
    "optimizer": (lambda g: g.stages[0].weight.detach().add_(g.stages[1].weight.detach()), BOTH),
}  # fmt: skip


def attention(g: SimpleNamespace) -> torch.Tensor:
    q, k = (dtorch.ones(1, 2, 4, 4, device_mesh=m, placements=[dtorch.Shard(2)]) for m in (FIRST, SECOND))
    return nn.functional.scaled_dot_product_attention(q, k, k)


@pytest.mark.parametrize("case", WRONG_STAGE)
def test_a_tensor_on_the_wrong_stage(given: SimpleNamespace, case: str) -> None:
    """Both meshes, what to do, and the line of the user's that does it."""
    call, text = WRONG_STAGE[case]
    line = {"input": "pipeline.run", "target": "pipeline.run", "attention": "return nn.functional"}.get(
        case, f"{case}.*lambda"
    )
    with pytest.raises(MeshMismatch, match=f"(?s){text}.*redistribute.*\n  at {__file__}:\\d+: .*{line}"):
        call(given)


def test_errors_of_a_stage_are_its_own(given: SimpleNamespace) -> None:
    """A KeyError inside a user's function is not taken for a step that is missing."""

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return {}["mine"]

    with pytest.raises(KeyError, match="mine"):
        run(given, loss=loss)
