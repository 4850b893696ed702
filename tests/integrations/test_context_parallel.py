"""An unmodified Llama on ids whose sequence is split communicates what attention needs, and nothing else of its activations."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dtorch
from dtorch import Shard

from . import tiny

pytestmark = pytest.mark.usefixtures("simulated")

#: Of the loss, which sums numbers over the sequence: its value and the weight of all targets.
LOSS = [("all_reduce", "aten.nll_loss2d_forward.default")] * 2


@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize(("axis", "attention"), [("ring_cp", {"shift", "all_to_all"}), ("ulysses_cp", {"all_to_all"})])
def test_llama(axis: str, attention: set[str], batch: int) -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**tiny.GROUPED))
    model = LlamaForCausalLM(plain.config)
    model.load_state_dict(plain.state_dict())
    mesh = dtorch.init_device_mesh("cpu", 2, (axis,))
    dtorch.distribute_module(model, mesh, {})
    ids = torch.randint(3, 64, (batch, 13))
    placed = dtorch.distribute_tensor(ids, mesh, [Shard(1)])
    with dtorch.record() as r:
        logits = model(placed, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.mT, placed).backward()
    assert logits.placements == [Shard(1)]
    kinds = {one.kind for one in r.communication if one.op == "scaled_dot_product_attention"}
    rest = [(one.kind, one.op) for one in r.communication if one.op != "scaled_dot_product_attention"]
    assert kinds == attention
    assert [one for one in rest if one != ("all_reduce", "gradient")] == LOSS
    assert r.fallbacks == []
    torch.nn.functional.cross_entropy(plain(ids, use_cache=False).logits.mT, ids).backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-5, msg=name)
