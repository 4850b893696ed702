"""transformers' ``pipeline`` runs a placed model as it runs any."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh

from .tiny import GROUPED, SPECIAL

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

MESH = DeviceMesh("cpu", [0, 1], ("tp",))
TEXTS = ["w1 w2 w3", "w9 w10 w11 w4 w5"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True},
    "in batches": {"do_sample": False, "batch_size": 2},
    "beams": {"do_sample": False, "num_beams": 2, "return_full_text": False},
}


@pytest.fixture(scope="module")
def drawn_as_torch() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(engine="simulate", random="torch")
    yield
    dtorch.shutdown()
    dtorch.init(random="counter")
    dtorch.shutdown()


def tokenizer() -> Any:
    """A word, a token."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(60))]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(64), strict=True)), "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


@pytest.mark.usefixtures("drawn_as_torch")
def test_text_generation() -> None:
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **SPECIAL)).eval()
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, "auto")
    for way, options in WAYS.items():
        found = []
        for each in (plain, model):
            torch.manual_seed(5)
            generate = transformers.pipeline("text-generation", model=each, tokenizer=tokenizer())
            found.append(generate(TEXTS, max_new_tokens=6, **options))
        assert found[1] == found[0], way
