"""Captured models: the Llama example, Hugging Face models forwards, in training, and in a decode step with a static cache."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh

from ..integrations.tiny import GPT2, GROUPED, SPECIAL, TEXT, WITH_A_PLAN
from ..integrations.tiny import MODELS as EVERY
from .same import close, runs

pytestmark = [pytest.mark.usefixtures("simulated"), pytest.mark.filterwarnings("error:dtorch.compile")]

MESH = DeviceMesh("cpu", [0, 1], ("tp",))
IDS = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(1))

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "Gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    ),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", GPT2 | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)),
    "BERT": ("BertConfig", "BertModel", {**TEXT, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}),
}


def hf_model(name: str) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    config_name, model_name, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**settings, **{k: v for k, v in SPECIAL.items() if k not in settings})
    plain = getattr(transformers, model_name)(config).eval()
    return dtorch.distribute_module(
        copy.deepcopy(plain), MESH, "auto" if GROUPED.items() <= settings.items() else {}
    ), plain


@pytest.mark.parametrize("name", EVERY)
def test_a_training_step_of_every_model(name: str) -> None:
    """Forward, backward and step in one message, the same as on one device."""
    transformers = pytest.importorskip("transformers")
    config, kind, settings, inputs = EVERY[name]
    torch.manual_seed(0)
    plain = getattr(transformers, kind)(getattr(transformers, config)(**settings)).train()
    model = dtorch.distribute_module(copy.deepcopy(plain), MESH, "auto" if name in WITH_A_PLAN else {})
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, plain)]

    def step(module: Any, optimizer: Any, inputs: dict[str, Any]) -> Any:
        loss = module(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = dtorch.compile(step)
    given = {k: dtorch.from_torch(v, MESH) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    for _ in range(2):
        found, count = runs(compiled, model, optimizers[0], given)
        close(found, step(plain, optimizers[1], {k: copy.copy(v) for k, v in inputs.items()}))
    assert count == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_hugging_face_forward(name: str) -> None:
    model, plain = hf_model(name)
    compiled = dtorch.compile(model)
    with torch.no_grad():
        for step in range(2):
            ids = 3 + (IDS + step) % 50
            mask = torch.ones_like(ids)
            mask[0, : step + 1] = 0
            for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": mask}):
                found, count = runs(compiled, **given)
                expected = plain(**given)
                close(found[0], expected[0])
                assert type(found) is type(expected)
                assert step == 0 or count == 1


def test_a_hugging_face_training_step() -> None:
    model, plain = hf_model("Llama")
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (model, plain)]

    def step(module: Any, optimizer: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = dtorch.compile(step)
    for i in range(4):
        ids = (IDS + i) % 60
        found, count = runs(compiled, model, optimizers[0], ids)
        close(found, step(plain, optimizers[1], ids))
    assert count == 1


def test_a_backward_outside_of_a_hugging_face_model() -> None:
    model, plain = hf_model("Llama")
    compiled = dtorch.compile(model)
    for i in range(2):
        ids = (IDS + i) % 60
        compiled(input_ids=ids, labels=ids).loss.backward()
        plain(input_ids=ids, labels=ids).loss.backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_torch(), theirs.grad, rtol=1e-4, atol=1e-5)


def test_decoding_with_a_static_cache() -> None:
    transformers = pytest.importorskip("transformers")
    model, plain = hf_model("Llama")
    found = []
    for module in (model, plain):
        cache = transformers.StaticCache(config=module.config, max_cache_len=24)
        forward = dtorch.compile(module) if module is model else module
        ids, tokens = IDS, []
        with torch.no_grad():
            for step in range(8):
                start = 0 if step == 0 else IDS.shape[1] + step - 1
                positions = torch.arange(start, start + ids.shape[1])
                (out, count) = runs(
                    forward,
                    input_ids=ids,
                    past_key_values=cache,
                    cache_position=positions,
                    position_ids=positions[None],
                )
                logits = out.logits[:, -1]
                ids = (logits.to_torch() if module is model else logits).argmax(-1, keepdim=True)
                tokens.append(ids)
        found.append(torch.cat(tokens, 1))
        if module is model:
            assert count == 1
    assert torch.equal(*found)


def test_choosing_tokens_on_the_mesh_with_a_static_cache() -> None:
    """As ``generate`` does, with nothing read: one message a token from the second on, and the positions are the cache's own."""
    transformers = pytest.importorskip("transformers")
    model, plain = hf_model("Llama")
    found = []
    for module in (model, plain):
        cache = transformers.StaticCache(config=module.config, max_cache_len=24)

        def step(tokens: Any, positions: Any, module: Any = module, cache: Any = cache) -> Any:
            logits = module(input_ids=tokens, past_key_values=cache, position_ids=positions).logits
            return logits[:, -1].argmax(-1, keepdim=True), positions[:, -1:] + 1

        tokens, positions, step_or_captured, chosen = IDS, torch.arange(8)[None], step, []
        if module is model:
            tokens, positions = (dtorch.from_torch(t, MESH) for t in (tokens, positions))
            step_or_captured = dtorch.compile(step)
        with torch.no_grad():
            for at in range(10):
                (tokens, positions), count = runs(step_or_captured, tokens, positions)
                assert at < 2 or count <= 1
                chosen.append(tokens)
        found.append([t.to_torch() if module is model else t for t in chosen])
    assert torch.equal(torch.cat(found[0], 1), torch.cat(found[1], 1))


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples" / "llama"))
    sys.modules.pop("model", None)
    import model

    yield model
    sys.modules.pop("model", None)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_training_the_llama_example(llama: Any, axes: dict[str, int]) -> None:
    torch.manual_seed(0)
    plain = llama.Llama(llama.Config())
    mesh = dtorch.init_device_mesh("cpu", tuple(axes.values()), tuple(axes))
    model = llama.Llama(llama.Config(), mesh)
    model.load_state_dict(plain.state_dict())
    optimizers = [
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, foreach="pp" not in axes)
        for module in (model, plain)
    ]

    def step(module: Any, optimizer: Any, ids: Any, targets: Any) -> Any:
        loss = torch.nn.functional.cross_entropy(module(ids).transpose(1, 2), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = dtorch.compile(step)
    first, last = (dtorch.pipeline.mesh_of(model.stages[at]) for at in (0, -1))
    for i in range(4):
        tokens = (torch.arange(36).reshape(4, 9) * (i + 3)) % 64
        where = {"dp": dtorch.Shard(0)}
        ids, targets = (
            dtorch.from_torch(t, m).redistribute_by_dict(placements_dict=where, default_placement_mode="replicate")
            for t, m in ((tokens[:, :-1], first), (tokens[:, 1:], last))
        )
        found, count = runs(compiled, model, optimizers[0], ids, targets)
        close(found, step(plain, optimizers[1], tokens[:, :-1], tokens[:, 1:]))
    assert count == 1 or "pp" in axes
