"""``generate()`` of unmodified models gives the tokens of plain transformers, and communicates what hand-written parallelism would."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard

from .tiny import GPT2, GROUPED, SPECIAL

transformers = pytest.importorskip("transformers")

MESH = DeviceMesh("cpu", [0, 1], ("tp",))
MODELS = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED | SPECIAL, "auto"),
    "one key head": ("LlamaConfig", "LlamaForCausalLM", {**GROUPED, **SPECIAL, "num_key_value_heads": 1}, "auto"),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED | SPECIAL, "auto"),
    "Mistral": ("MistralConfig", "MistralForCausalLM", GROUPED | SPECIAL | {"sliding_window": 6}, "auto"),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", GROUPED | SPECIAL | {"num_local_experts": 4}, "auto"),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", GPT2 | SPECIAL, {"*": [Shard(0)]}),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 10, "temperature": 0.8},
    "nucleus": {"do_sample": True, "top_p": 0.8},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "static sampling": {"cache_implementation": "static", "do_sample": True, "top_k": 10},
    "static beams": {"cache_implementation": "static", "num_beams": 2},
    "no cache": {"use_cache": False},
    "prefilled in chunks": {"prefill_chunk_size": 3},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "assisted": {"assistant_model": True},
}
#: A batch with left padding.
IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
IDS[0, :3] = MASK[0, :3] = 0


@pytest.fixture(scope="module", params=["simulate", "processes"])
def drawn_as_torch(request: pytest.FixtureRequest) -> Iterator[str]:
    dtorch.shutdown()
    dtorch.init(engine=request.param, random="torch")
    yield request.param
    dtorch.shutdown()
    dtorch.init(random="counter")
    dtorch.shutdown()


def both(name: str, **options: Any) -> tuple[Any, Any]:
    """A model, and the same one placed; ``options`` of its configuration."""
    config, kind, arguments, plan = MODELS[name]
    torch.manual_seed(0)
    plain = getattr(transformers, kind)(getattr(transformers, config)(**arguments, **options)).eval()
    return plain, dtorch.distribute_module(copy.deepcopy(plain), MESH, plan)


CASES = [(name, way) for name in ("Llama", "Mistral", "GPT2") for way in WAYS]
CASES += [("one key head", way) for way in ("greedy", "beams", "static cache", "prefilled in chunks")]
CASES += [("Mixtral", way) for way in ("greedy", "beams", "static cache")]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_the_same_tokens(drawn_as_torch: str, name: str, way: str) -> None:
    if drawn_as_torch == "processes" and (name, way) not in (("Llama", "sampling"), ("GPT2", "greedy")):
        pytest.skip("one of each kind is enough on real workers")
    plain, model = both(name)
    ids, mask, options, ours = IDS, MASK, dict(WAYS[way]), dict(WAYS[way])
    if way == "assisted":
        options["assistant_model"], ours["assistant_model"] = both(name)
        ids, mask = IDS[1:], MASK[1:]
    torch.manual_seed(3)
    expected = plain.generate(ids, attention_mask=mask, max_new_tokens=6, **options)
    torch.manual_seed(3)
    with dtorch.record() as r:
        found = model.generate(
            dtorch.from_torch(ids, MESH), attention_mask=dtorch.from_torch(mask, MESH), max_new_tokens=6, **ours
        )
    assert torch.equal(found.to_torch(), expected)
    if MODELS[name][3] == "auto":  # then heads are split, and no query, key or value moves
        assert not any(len(one.shape) == 4 for one in r.communication)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mistral", "Mixtral"])
def test_a_layer_needs_two_all_reduces(drawn_as_torch: str, name: str, attention: str) -> None:
    """One after attention and one after the MLP; one more after the embedding, which is split by its vocabulary.

    That of a mixture is of what each token's experts make, before they are weighted and added up.
    """
    plain, model = both(name, attn_implementation=attention)
    ids = dtorch.from_torch(IDS, MESH)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            out, expected = model(ids), plain(IDS)
            torch.testing.assert_close(out.logits.to_torch().detach(), expected.logits.detach())
            with dtorch.record() as r:
                out = model(ids)
            _is_two_a_layer(r, name, IDS.numel())
            assert out.logits.placements == [Shard(2)]
            with dtorch.record() as r:
                model(ids[:, :1], past_key_values=out.past_key_values)
            _is_two_a_layer(r, name, len(IDS))


def _is_two_a_layer(r: Any, name: str, tokens: int) -> None:
    assert [one.kind for one in r.communication] == ["all_reduce"] * (2 * 2 + 1)
    experts = {(2 * tokens, 32)} if name == "Mixtral" else set()
    assert {one.shape for one in r.communication} == {(len(IDS), tokens // len(IDS), 32)} | experts
    assert r.fallbacks == []


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_the_cache_is_split_by_heads(drawn_as_torch: str, cache: str) -> None:
    plain, model = both("Llama")
    made = (
        transformers.DynamicCache(config=plain.config)
        if cache == "dynamic"
        else transformers.StaticCache(config=plain.config, max_cache_len=16)
    )
    ids = dtorch.from_torch(IDS[:, :4], MESH)
    with torch.no_grad(), dtorch.record() as r:
        for step in range(4):
            ids = model(ids if step == 0 else ids[:, -1:], past_key_values=made).logits.argmax(-1)
    for layer in made.layers:
        assert layer.keys.placements == layer.values.placements == [Shard(1)]
    heads = [one for one in r.communication if len(one.shape) == 4]
    assert heads == []
