"""Configurations of models so small that a test of them takes a second."""

from __future__ import annotations

from typing import Any

import torch

#: Names that most configurations of text models share.
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
#: Those with grouped-query attention: Llama and its like.
GROUPED: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
#: Ids of special tokens.
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

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
