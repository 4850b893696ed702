"""`from_pretrained` and `save_pretrained`: what plain transformers loads and saves, to the bit, and without its memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard
from dtorch.integrations.transformers import from_pretrained

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

from .tiny import GROUPED  # noqa: E402

pytestmark = pytest.mark.usefixtures("engine")

TP = DeviceMesh("cpu", [0, 1], ("tp",))
GRID = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"))
FSDP = {"*": [Shard(0)]}

LLAMA = GROUPED | {"bos_token_id": 1, "eos_token_id": 2}

MARIAN: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
}


def made(name: str, **more: Any) -> Any:
    """A tiny model with random weights."""
    torch.manual_seed(0)
    t = transformers
    model = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA | more)),
        "llama tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**LLAMA, num_local_experts=3, num_experts_per_tok=2)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=2)
        ),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
        ),
        "bert": lambda: t.BertForMaskedLM(
            t.BertConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
            )
        ),
        "marian": lambda: t.MarianMTModel(t.MarianConfig(**MARIAN)),  # its tables of sines are in no checkpoint
    }[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    return model.eval()


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The state dict and the buffers that it leaves out, plain."""
    found = {**model.state_dict(), **dict(model.named_buffers())}
    return {name: value.to_torch() if isinstance(value, dtorch.Tensor) else value for name, value in found.items()}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


def run(model: Any, mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The logits of two short sequences."""
    ids = torch.arange(12).reshape(2, 6) % 64
    ids = ids if mesh is None else dtorch.distribute_tensor(ids, mesh)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits = model(input_ids=ids, **more).logits
    return logits if mesh is None else logits.to_torch()


CASES: dict[str, tuple[str, DeviceMesh, Any, Any]] = {
    "llama": ("llama", TP, "auto", None),
    "llama on a grid, in bfloat16": ("llama", GRID, "auto", "bfloat16"),
    "tied": ("llama tied", TP, "auto", None),
    "experts are fused": ("mixtral", TP, "auto", None),
    "experts are fused and converted": ("mixtral", TP, FSDP, torch.float16),
    "transposed weights": ("gpt2", TP, FSDP, None),
    "some of it stays in float32": ("t5", TP, FSDP, torch.float16),
    "replicated": ("bert", TP, {}, None),
    "tables made by the model": ("marian", TP, FSDP, None),
}


@pytest.mark.parametrize("case", CASES)
def test_loaded_as_plain_transformers_does(case: str, tmp_path: Path) -> None:
    name, mesh, plan, dtype = CASES[case]
    made(name).save_pretrained(tmp_path / "a", max_shard_size="30KB")
    plain = getattr(transformers, type(made(name)).__name__).from_pretrained(tmp_path / "a", dtype=dtype or "auto")
    there = from_pretrained(tmp_path / "a", mesh, plan, dtype)
    assert type(there) is type(plain)
    assert not there.training
    assert_equal(tensors(there), tensors(plain))
    assert all(t.device_mesh == mesh for t in [*there.parameters(), *there.buffers()])
    assert len(list(there.parameters())) == len(list(plain.parameters()))  # tied ones are one
    tolerance = 1e-4 if dtype is None else 5e-2
    torch.testing.assert_close(run(there, mesh), run(plain), rtol=tolerance, atol=tolerance)
    # and back
    there.save_pretrained(tmp_path / "b", max_shard_size="30KB")
    plain.save_pretrained(tmp_path / "c", max_shard_size="30KB")
    assert sorted(os.listdir(tmp_path / "b")) == sorted(os.listdir(tmp_path / "c"))
    for file in os.listdir(tmp_path / "b"):
        if file.endswith(".safetensors"):
            assert_equal(load_file(tmp_path / "b" / file), load_file(tmp_path / "c" / file))
        else:
            assert json.loads((tmp_path / "b" / file).read_text()) == json.loads((tmp_path / "c" / file).read_text())
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["llama tied", "mixtral"])
def test_saved_by_io_loads_in_plain_transformers(name: str, tmp_path: Path) -> None:
    made(name).save_pretrained(tmp_path)
    there = from_pretrained(tmp_path, TP)
    with torch.no_grad():
        for parameter in there.parameters():
            parameter.mul_(2)
    dtorch.io.save(there, tmp_path, max_shard_size="30KB")
    assert not (tmp_path / "model.safetensors").exists()
    again = type(there).from_pretrained(tmp_path)
    assert_equal(tensors(again), tensors(there))


def test_generate(tmp_path: Path) -> None:
    plain = made("llama")
    plain.generation_config.max_new_tokens = 6
    plain.generation_config.do_sample = False
    plain.generation_config.eos_token_id = None
    plain.save_pretrained(tmp_path)
    there = from_pretrained(tmp_path, TP)
    assert there.generation_config.max_new_tokens == 6
    ids = torch.tensor([[3, 5, 7, 9]])
    found = there.generate(dtorch.distribute_tensor(ids, TP))
    assert torch.equal(found.to_torch(), plain.generate(ids))


def test_each_device_reads_only_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtorch.io import transfers

    made("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    moved = []
    finish = transfers.Tally.finish
    monkeypatch.setattr(transfers.Tally, "finish", lambda self: moved.append(finish(self)))
    there = from_pretrained(tmp_path, TP, FSDP)
    assert len(moved) == 1
    for device, nbytes in moved[0].items():
        held = sum(parameter.local_shards()[device].nbytes for parameter in there.parameters())
        assert nbytes == held
    assert sum(moved[0].values()) == sum(parameter.nbytes for parameter in there.parameters())


def test_save_pretrained_of_models_made_otherwise(tmp_path: Path) -> None:
    """One that was placed by hand, inside another module, and a state dict of the caller's."""
    plain = made("llama")
    plain.save_pretrained(tmp_path / "plain")
    holder = torch.nn.ModuleDict({"policy": made("llama")})
    dtorch.distribute_module(holder, TP, {"*proj.weight": [Shard(0)]})
    holder["policy"].save_pretrained(tmp_path / "a")
    state = {name: value * 1 for name, value in holder["policy"].state_dict().items()}
    holder["policy"].save_pretrained(tmp_path / "b", True, state)
    for folder in "ab":
        found = load_file(tmp_path / folder / "model.safetensors")
        assert_equal(found, load_file(tmp_path / "plain" / "model.safetensors"))


def test_a_placed_model_is_an_ordinary_object(tmp_path: Path) -> None:
    """Copies and pickles of it save too; it dies with its last reference; plain models save as ever."""
    model = dtorch.distribute_module(made("llama", num_hidden_layers=1), TP, "auto")
    expected = tensors(model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), made("llama", num_hidden_layers=1)]
    for number, other in enumerate(copies):
        other.save_pretrained(tmp_path / str(number))
        assert_equal(tensors(type(model).from_pretrained(tmp_path / str(number))), expected)
    del copies, other
    gc.collect()
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_tied_by_the_config_but_different_in_the_file(tmp_path: Path) -> None:
    made("llama tied").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    same = state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    for both, tied in ((same, True), (same | {"lm_head.weight": torch.randn(64, 32)}, False)):
        save_file(both, tmp_path / "model.safetensors", metadata={"format": "pt"})
        plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        there = from_pretrained(tmp_path, TP)
        assert_equal(tensors(there), tensors(plain))
        assert (there.lm_head.weight is there.model.embed_tokens.weight) is tied


# -- bad input -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def changed(file: Path, **values: Any) -> Iterator[None]:
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | values))
    yield
    file.write_text(before)


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json in .*; huggingface_hub\.snapshot_download"):
        from_pretrained("some/model", TP)
    made("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    with (
        changed(config, architectures=["NoSuchModel"]),
        pytest.raises(ValueError, match="class NoSuchModel, which transf"),
    ):
        from_pretrained(tmp_path, TP)
    with (
        changed(config, architectures=None),
        pytest.raises(ValueError, match=r"names no class; build the model yourself"),
    ):
        from_pretrained(tmp_path, TP)
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with changed(config, quantization_config=quantised), pytest.raises(ValueError, match="are quantised"):
        from_pretrained(tmp_path, TP)
    with pytest.raises(ValueError, match="dtype must be a floating dtype"):
        from_pretrained(tmp_path, TP, dtype="int8")
    with pytest.raises(TypeError, match="'mesh' must be a DeviceMesh, not str"):
        from_pretrained(tmp_path, "cpu")
    with pytest.raises(ValueError, match="near"):
        from_pretrained(tmp_path, TP, {"model.layer.*": [Shard(0)]})
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        from_pretrained(tmp_path, TP)


def test_bad_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made("mixtral").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)

    def write(**values: Any) -> None:
        found = {**state, **values}
        save_file({n: v for n, v in found.items() if v is not None}, file, metadata={"format": "pt"})

    norm, expert = "model.norm.weight", "model.layers.0.block_sparse_moe.experts.{}.w1.weight"
    write(**{norm: None})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' of the model is missing"):
        from_pretrained(tmp_path, TP)
    write(**{norm: torch.ones(7)})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has shape \(7,\) in .*model\.safetensors and \(32,\)"):
        from_pretrained(tmp_path, TP)
    write(**{expert.format(i): None for i in range(3)})
    with pytest.raises(
        ValueError,
        match=r"'model\.layers\.0\.mlp\.experts\.gate_up_proj' cannot be made of '.*w3\.weight' in .*model\.safe",
    ):
        from_pretrained(tmp_path, TP)
    write(**{expert.format(i): torch.ones(40, 32) for i in range(3)})
    with pytest.raises(
        ValueError, match=r"gate_up_proj' has shape \(3, 96, 32\) in the model and \(3, 88, 32\) as made of"
    ):
        from_pretrained(tmp_path, TP)
    write(more=torch.ones(2))
    from_pretrained(tmp_path, TP)
    assert "holds tensors that the model lacks: more" in caplog.text
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors: the file is truncated: tensor"):
        from_pretrained(tmp_path, TP)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made("bert").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(dtorch.errors.DTorchError, match=r"pip install 'dtorch\[transformers\]'"):
        from_pretrained(tmp_path, TP)


# -- memory ----------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, re, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import torch, dtorch, transformers
from pathlib import Path
from dtorch.io.formats import header

def most() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) >> 10

def checkpoint(folder: Path, width: int) -> None:
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=width, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(folder)
    beginning, _, size = header(model.state_dict(), {"format": "pt"})
    with open(folder / "model.safetensors", "wb") as file:
        file.write(beginning)
        file.truncate(size)  # sparse: zeros

mesh = dtorch.DeviceMesh("cpu", [0, 1], ("tp",))
folder = Path(sys.argv[1])
for name, width in (("small", 64), ("large", int(sys.argv[2]) * (1 << 20) // (3 * 64 * 4))):
    checkpoint(folder / name, width)
    before = most()
    model = dtorch.integrations.transformers.from_pretrained(folder / name, mesh)
    dtorch.synchronize()
print(most() - before, sum(p.nbytes for p in model.parameters()) >> 20)
"""


def test_the_client_never_holds_the_model(tmp_path: Path, engine: str) -> None:
    if engine == "simulate":
        pytest.skip("there, the workers are in this process")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), "256"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split()[-2:])
    assert size >= 255
    assert grown < 60, f"the client grew by {grown} MiB for a model of {size} MiB"
