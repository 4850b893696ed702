"""Twenty steps of training, however the model and the data are placed, follow the loss curve of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard

from .tiny import GROUPED

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("simulated")

MESH = DeviceMesh("cpu", [0, 1], ("axis",))
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
#: Ten times the same four batches, so that there is something to learn.
BATCHES = torch.randint(0, 64, (4, 4, 8), generator=torch.Generator().manual_seed(1)).repeat(10, 1, 1)
#: How the model is placed, and the batch.
WAYS: dict[str, tuple[DeviceMesh, Any, list[Any]]] = {
    "data parallel": (MESH, {}, [Shard(0)]),
    "fully sharded": (MESH, {"*": [Shard(0)]}, [Shard(0)]),
    "tensor parallel": (DeviceMesh("cpu", [0, 1], ("tp",)), "auto", [Replicate()]),
    "both": (GRID, "auto", [Shard(0), Replicate()]),
}


def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def curve(model: Any, batches: list[Any], dtype: torch.dtype | None = None, accumulate: int = 2) -> list[float]:
    """The losses of steps of AdamW with accumulation, clipping and a schedule; under autocast to ``dtype`` if given."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(batches) // accumulate)
    device = next(model.parameters()).device.type
    losses = []
    for number, ids in enumerate(batches):
        with torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(input_ids=ids, labels=ids).loss
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if (number + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return [float(loss) for loss in losses]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return curve(model(), list(BATCHES))


@pytest.mark.parametrize("way", WAYS)
def test_the_loss_curve_is_that_of_one_device(way: str, plain: list[float]) -> None:
    mesh, plan, batch = WAYS[way]
    placed = dtorch.distribute_module(copy.deepcopy(model()), mesh, plan)
    found = curve(placed, [dtorch.from_torch(ids, mesh, batch) for ids in BATCHES])
    assert len(found) == 40
    assert found == pytest.approx(plain, abs=1e-4)
    assert plain[-1] < plain[0]


def test_mixed_precision() -> None:
    """bfloat16 rounds otherwise where a sum is split, so the curves are as close as bfloat16 is."""
    expected = curve(model(), list(BATCHES[:8]), torch.bfloat16)
    placed = dtorch.distribute_module(model(), MESH, {"*": [Shard(0)]})
    found = curve(placed, [dtorch.from_torch(ids, MESH, [Shard(0)]) for ids in BATCHES[:8]], torch.bfloat16)
    assert found == pytest.approx(expected, abs=2e-2)
