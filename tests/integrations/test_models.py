"""Unmodified Hugging Face models train as on one device: loss, gradients, one AdamW step, with gradient checkpointing."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard

from .tiny import MODELS, WITH_A_PLAN

transformers = pytest.importorskip("transformers")

MESH = DeviceMesh("cpu", [0, 1], ("tp",))

PLANS = {"replicated": {}, "auto": "auto", "fsdp": {"*": [Shard(0)]}}
#: Every model, plan and attention implementation that there is.
CASES = [
    (name, plan, attention)
    for name in MODELS
    for attention in ("eager", "sdpa")
    for plan in PLANS
    if (plan != "auto" or name in WITH_A_PLAN) and (name, attention) != ("Gemma2", "sdpa")
]
#: On real workers: a spread.
REAL = [("Llama", "auto", "sdpa"), ("Mixtral", "auto", "sdpa"), ("T5", "fsdp", "eager"), ("CLIP", "replicated", "sdpa")]


def trained(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The loss, and the gradients by name; the model has taken a step."""
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@functools.cache
def on_one_device(name: str, attention: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The untrained model; then trained, its loss and its gradients."""
    config, kind, arguments, inputs = MODELS[name]
    torch.manual_seed(0)
    plain = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
    plain.set_attn_implementation(attention)
    untrained = copy.deepcopy(plain)
    return untrained, plain, *trained(plain, {k: copy.copy(v) for k, v in inputs.items()})


def check(name: str, plan: str, attention: str) -> None:
    untrained, plain, loss, gradients = on_one_device(name, attention)
    model = dtorch.distribute_module(copy.deepcopy(untrained), MESH, PLANS[plan])
    inputs = MODELS[name][3]
    placed = {k: dtorch.from_torch(v, MESH) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    with dtorch.record() as r:
        our_loss, ours = trained(model, placed)
    torch.testing.assert_close(our_loss.to_torch(), loss)
    # Gradients that are zero but for rounding (a key's bias) are compared on the scale of the others.
    scale = max(g.abs().max().item() for g in gradients.values() if g is not None)
    for parameter, expected in gradients.items():
        if expected is None:
            assert ours[parameter] is None, parameter
            continue
        torch.testing.assert_close(ours[parameter].to_torch(), expected, rtol=1e-4, atol=1e-5 * scale, msg=parameter)
    for (parameter, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.detach().to_torch(), expected.detach(), rtol=1e-3, atol=2e-4, msg=parameter)
    assert r.fallbacks == []


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(("name", "plan", "attention"), CASES)
def test_a_training_step(name: str, plan: str, attention: str) -> None:
    check(name, plan, attention)


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(engine="processes")
    yield
    dtorch.shutdown()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize(("name", "plan", "attention"), REAL)
def test_on_workers(name: str, plan: str, attention: str) -> None:
    check(name, plan, attention)
