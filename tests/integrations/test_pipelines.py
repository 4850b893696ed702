"""transformers' ``pipeline`` and ``Trainer`` run a placed model as they run any."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dtorch
from dtorch import DeviceMesh, Shard

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


class Arguments(transformers.TrainingArguments):
    """The guide's; ``Trainer`` pickles them by name."""

    place = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        super().device  # noqa: B018 - makes accelerate ready
        return self.place


@pytest.mark.usefixtures("drawn_as_torch")
@pytest.mark.parametrize("plan", ["auto", {"*": [Shard(0)]}], ids=["auto", "fully sharded"])
def test_trainer(plan: Any, tmp_path: Path) -> None:
    """The guide's arguments: their device is the model's."""
    pytest.importorskip("accelerate")
    ids = torch.randint(3, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, **SPECIAL))
    placed = dtorch.distribute_module(copy.deepcopy(plain), MESH, plan)
    found = []
    for model in (plain, placed):
        folder = str(tmp_path / type(next(model.parameters())).__name__)
        Arguments.place = model.device
        arguments = Arguments(
            folder, max_steps=4, per_device_train_batch_size=4, logging_steps=1, report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
        trainer.train()
        steps = [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]
        trainer.save_model(folder)
        saved = transformers.LlamaForCausalLM.from_pretrained(folder)
        found.append((steps, trainer.evaluate()["eval_loss"], [p.detach() for p in saved.parameters()]))
    torch.testing.assert_close(found[1], found[0])
