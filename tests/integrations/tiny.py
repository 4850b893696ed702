"""Configurations of models so small that a test of them takes a second."""

from __future__ import annotations

from typing import Any

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
