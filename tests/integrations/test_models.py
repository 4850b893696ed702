"""Unmodified Hugging Face models train as on one device: loss, gradients, one AdamW step, with gradient checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard

from .tiny import GPT2, GROUPED, TEXT

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("simulated")

MESH = DeviceMesh("cpu", [0, 1], ("tp",))

IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))
INPUTS = {"input_ids": IDS, "labels": IDS}
PICTURES = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))

TINY_VISION = {
    key: TEXT[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
}
TINY_VISION |= {"image_size": 16, "patch_size": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}

#: Name: (configuration, model, the configuration's arguments, inputs).
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, INPUTS),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED, INPUTS),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, INPUTS),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 4}, INPUTS),
    "Gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
        INPUTS,
    ),
    "Phi3": ("Phi3Config", "Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}, INPUTS),
    "GPT2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        GPT2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
        INPUTS,
    ),
    "OPT": (
        "OPTConfig",
        "OPTForCausalLM",
        {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0},
        INPUTS,
    ),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}, INPUTS),
    "Qwen2-MoE": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
        | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
        INPUTS,
    ),
    "BERT": ("BertConfig", "BertForMaskedLM", {**TEXT, **NO_DROPOUT}, INPUTS),
    "T5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0, "decoder_start_token_id": 0},
        INPUTS,
    ),
    "ViT": (
        "ViTConfig",
        "ViTForImageClassification",
        {**TINY_VISION, **NO_DROPOUT, "num_labels": 5},
        {"pixel_values": PICTURES, "labels": torch.tensor([1, 3])},
    ),
    "CLIP": (
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
            "vision_config": TINY_VISION,
            "projection_dim": 16,
        },
        {"input_ids": IDS, "pixel_values": PICTURES, "return_loss": True},
    ),
    "Whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
        | {f"{part}_layers": 2 for part in ("encoder", "decoder")}
        | {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
        | {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}
        | dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0)
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
        | {"suppress_tokens": [], "begin_suppress_tokens": []},
        {"input_features": torch.rand(2, 8, 32, generator=torch.Generator().manual_seed(1)), "labels": IDS},
    ),
}
#: Those that bring a tensor-parallel plan of their own.
WITH_A_PLAN = ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Phi3", "Mixtral", "Qwen2-MoE")
CASES = [*((name, "fsdp", "sdpa") for name in MODELS if name != "Gemma2"), ("Gemma2", "fsdp", "eager")]
CASES += [(name, "auto", "eager" if name == "Gemma2" else "sdpa") for name in WITH_A_PLAN]
CASES += [("Llama", "auto", "eager"), ("GPT2", "replicated", "eager"), ("T5", "fsdp", "eager")]
PLANS = {"auto": "auto", "replicated": {}, "fsdp": {"*": [Shard(0)]}}


def trained(model: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The loss, and the gradients by name; the model has taken a step."""
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("name", "plan", "attention"), CASES)
def test_a_training_step(name: str, plan: str, attention: str) -> None:
    config, kind, arguments, inputs = MODELS[name]
    torch.manual_seed(0)
    plain = getattr(transformers, kind)(getattr(transformers, config)(**arguments))
    plain.set_attn_implementation(attention)
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, PLANS[plan])
    loss, gradients = trained(plain, {k: copy.copy(v) for k, v in inputs.items()})
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
