"""``plan="auto"``: unmodified models by the tensor-parallel plan that they bring, with the numbers of plain torch."""

from __future__ import annotations

import copy
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Replicate, Shard, distribute_module

from .training import MESHES, assert_same, placed, step

pytestmark = pytest.mark.usefixtures("engine")

TP4 = DeviceMesh("cpu", [0, 1, 2, 3], ("tp",))


class Attention(torch.nn.Module):
    """Grouped-query attention in the shape of Hugging Face's: two key heads for four query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 3
        self.q_proj, self.o_proj = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)
        self.k_proj, self.v_proj = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(*x.shape[:2], -1))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.layers = torch.nn.ModuleList([Attention(), Attention()])
        self.head = torch.nn.Linear(6, 11)
        self.tp_plan = {
            "embed": "rowwise",
            "layers.*.q_proj": "colwise",
            "layers.*.k_proj": "colwise",
            "layers.*.v_proj": "local_colwise",
            "layers.*.o_proj": "rowwise_rep",
            "layers.*.norm": "sequence_parallel",
            "head": "colwise_gather_output",
        }

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize("mesh", ["one device", "no names", "dp", "tp2", "tp3", "dp tp", "tp4"])
def test_a_model_with_a_plan(mesh: str) -> None:
    torch.manual_seed(0)
    alone = Model()
    ids = torch.randint(11, (4, 5))
    where = TP4 if mesh == "tp4" else MESHES[mesh]
    there = distribute_module(copy.deepcopy(alone), where, "auto")
    assert_same(step(there, placed(ids, where)), step(alone, ids))


def test_where_the_styles_put_parameters() -> None:
    there = distribute_module(Model(), MESHES["dp tp"], "auto")
    found = {name: p.placements[1] for name, p in there.named_parameters() if "layers.1" not in name}
    whole = Replicate()
    assert all(p.placements[0] == whole for p in there.parameters())
    assert found == {
        "embed.weight": Shard(0),
        "layers.0.q_proj.weight": Shard(0),
        "layers.0.q_proj.bias": Shard(0),
        "layers.0.o_proj.weight": Shard(1),
        "layers.0.o_proj.bias": whole,
        "layers.0.k_proj.weight": Shard(0),
        "layers.0.k_proj.bias": Shard(0),
        "layers.0.v_proj.weight": Shard(0),
        "layers.0.v_proj.bias": Shard(0),
        "head.weight": Shard(0),
        "head.bias": Shard(0),
    }


def test_heads_that_do_not_divide(caplog: pytest.LogCaptureFixture) -> None:
    """Two key heads on four devices: whole on each, and said so, once for all layers."""
    with caplog.at_level(logging.WARNING, "dtorch"):
        there = distribute_module(Model(), TP4, "auto")
    assert there.layers[0].q_proj.weight.placements == [Shard(0)]
    assert there.layers[0].k_proj.weight.placements == [Replicate()]
    words = "layers.*.k_proj.weight: its 2 heads do not divide over tp=4; replicated, so that no head is cut"
    assert caplog.text.count(words) == 1
    assert str(dtorch.summary(there)).count(f"note: {words}") == 1


@pytest.mark.parametrize(
    ("mesh", "told"), [("one device", False), ("no names", False), ("tp2", False), ("dp tp", False), ("dp", True)]
)
def test_a_mesh_without_the_axis_replicates_and_says_so(
    mesh: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dtorch"):
        there = distribute_module(Model(), MESHES[mesh], "auto")
    words = "splits along an axis 'tp', and DeviceMesh('cpu', [0, 1], mesh_dim_names=('dp',)) has only 'dp'; the whole model is replicated"
    assert (words in caplog.text) == told
    assert (f"note: plan='auto' {words}" in str(dtorch.summary(there))) == told
    assert not told or all(p.placements == [Replicate()] for p in there.parameters())


def test_a_style_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.tp_plan["head"] = "diagonal"
    with caplog.at_level(logging.WARNING, "dtorch"):
        distribute_module(model, MESHES["tp2"], "auto")
    assert model.head.weight.placements == [Replicate()]
    assert "head.weight: the style 'diagonal' is not known here; replicated" in caplog.text


def test_where_the_plan_is_looked_for() -> None:
    model = Model()
    model._tp_plan = model.__dict__.pop("tp_plan")
    assert distribute_module(model, MESHES["tp2"], "auto").head.weight.placements == [Shard(0)]
    model = Model()
    model.config = SimpleNamespace(base_model_tp_plan=model.__dict__.pop("tp_plan"))
    wrapper = torch.nn.Sequential(model)
    with pytest.raises(ValueError, match=r"Sequential has no tensor-parallel plan of its own.*its part '0' has one"):
        distribute_module(wrapper, MESHES["tp2"], "auto")
    assert distribute_module(model, MESHES["tp2"], "auto").head.weight.placements == [Shard(0)]


def test_axes_without_names() -> None:
    with pytest.raises(ValueError, match=r"which axis of .* is 'tp'; give mesh_dim_names="):
        distribute_module(Model(), DeviceMesh("cpu", [[0, 1], [2, 3]]), "auto")


SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("mesh", ["tp2", "dp tp", "tp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face(family: str, mesh: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    alone = getattr(transformers, f"{family}ForCausalLM")(config)
    where = TP4 if mesh == "tp4" else MESHES[mesh]
    there = distribute_module(copy.deepcopy(alone), where, "auto")
    split = [name for name, p in there.named_parameters() if any(placement == Shard(0) for placement in p.placements)]
    assert "model.layers.0.self_attn.q_proj.weight" in split
    assert ("model.layers.0.self_attn.k_proj.weight" in split) == (mesh != "tp4")
    tied = config.tie_word_embeddings
    assert (there.lm_head.weight is there.model.embed_tokens.weight) == tied
    ids = torch.randint(48, (4, 6))
    loss = lambda module: lambda ids: module(input_ids=ids, labels=ids).loss
    logits = lambda module: lambda ids: module(input_ids=ids).logits
    for how in (logits, loss):
        assert_same(_step(there, ids, where, how), _step(alone, ids, None, how), 1e-4)


def _step(model: torch.nn.Module, ids: torch.Tensor, mesh: DeviceMesh | None, how: Any) -> dict[str, Any]:
    model = copy.deepcopy(model)
    return step(model, ids if mesh is None else placed(ids, mesh), call=how(model))


def test_hugging_face_built_without_memory(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**SIZES)
    torch.manual_seed(0)
    alone = transformers.LlamaForCausalLM(config)
    with torch.device("meta"):
        there = transformers.LlamaForCausalLM(config)
    with caplog.at_level(logging.WARNING, "dtorch"):
        distribute_module(there, MESHES["tp2"], "auto")
    assert "no state dict fills, set them yourself: model.rotary_emb.inv_freq" in caplog.text
    there.load_state_dict(alone.state_dict())
    for name, buffer in alone.named_buffers():
        there.get_buffer(name).copy_(buffer)
    ids = torch.randint(48, (4, 6))
    logits = lambda module: lambda ids: module(input_ids=ids).logits
    assert_same(_step(there, ids, MESHES["tp2"], logits), _step(alone, ids, None, logits), 1e-4)
