"""The Llama of the guide is, on every mesh of its five axes, what it is on one device: logits, loss and all gradients."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Replicate, Shard

AXES = ("dp", "tp", "pp", "ulysses_cp", "ring_cp")
EVERY = [dict(zip(AXES, sizes, strict=True)) for sizes in itertools.product((1, 2), repeat=5)]
#: On real workers: every axis alone, and each with another.
REAL = [{axis} for axis in AXES] + [
    {"dp", "tp"},
    {"tp", "pp"},
    {"dp", "pp"},
    {"tp", "ulysses_cp"},
    {"pp", "ring_cp"},
    {"ulysses_cp", "ring_cp"},
]


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """``examples/llama/run.py``."""
    folder = str(Path(__file__).parents[2] / "examples" / "llama")
    sys.path.insert(0, folder)
    import run

    yield run
    sys.path.remove(folder)
    for name in ("run", "model"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def plain(example: ModuleType) -> tuple:
    """A tiny model in plain torch, a batch, and what one step makes of it."""
    torch.manual_seed(0)
    model = example.Llama(example.Config(vocabulary=24, width=16, hidden=24, layers=2, heads=4, kv_heads=2))
    tokens = torch.randint(24, (4, 9))
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    return model, ids, targets, example.alone(model, ids, targets)


def check(example: ModuleType, plain: tuple, mesh: dtorch.DeviceMesh, micro_batches: int) -> dtorch.Recording:
    model, ids, targets, expected = plain
    placed = example.Llama(model.config, mesh)
    placed.load_state_dict(model.state_dict())
    with dtorch.record() as r:
        found = example.on_mesh(placed, ids, targets, micro_batches)
    worst = example.differences(found, expected)
    assert len(worst) == 2 + len(list(model.parameters()))
    assert max(worst.values()) <= 1e-5, worst
    return r


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("sizes", EVERY, ids=lambda sizes: " ".join(axis for axis in AXES if sizes[axis] > 1) or "one")
def test_every_combination_simulated(example: ModuleType, plain: tuple, sizes: dict[str, int]) -> None:
    """And nothing is gathered for lack of a rule; what attention moves it was asked to by the name of the axis."""
    r = check(example, plain, example.make_mesh(sizes), sizes["pp"])
    assert r.fallbacks == []
    attention = {one.kind for one in r.communication if one.op == "scaled_dot_product_attention"}
    assert ("shift" in attention) == (sizes["ring_cp"] > 1)
    assert bool(attention) == (sizes["ring_cp"] > 1 or sizes["ulysses_cp"] > 1)


@pytest.mark.usefixtures("simulated")
def test_axes_of_one_device_change_nothing(example: ModuleType, plain: tuple) -> None:
    check(example, plain, dtorch.init_device_mesh("cpu", (1, 2, 2, 1, 2), AXES), 4)


@pytest.mark.usefixtures("simulated")
def test_the_model_as_one_module(example: ModuleType, plain: tuple) -> None:
    """Called and differentiated as a whole, across its stages; activations keep the batch's and the sequence's splits."""
    model, ids, targets, expected = plain
    mesh = dtorch.init_device_mesh("cpu", (2, 2, 2), ("dp", "pp", "ring_cp"))
    placed = example.Llama(model.config, mesh)
    placed.load_state_dict(model.state_dict())
    first, last = mesh.unbind("pp")
    logits = placed(dtorch.from_torch(ids, first, [Shard(0), Shard(1)]))
    assert (logits.device_mesh, logits.placements) == (last, [Shard(0), Shard(1)])
    loss = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), dtorch.from_torch(targets, last, [Shard(0), Shard(1)])
    )
    loss.backward()
    found = example.Result(logits.detach(), loss.detach(), example.gradients(placed))
    assert max(example.differences(found, expected).values()) <= 1e-5


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    dtorch.shutdown()
    dtorch.init(engine="processes")
    yield
    dtorch.shutdown()


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("axes", REAL, ids=lambda axes: " ".join(sorted(axes)))
def test_on_workers(example: ModuleType, plain: tuple, axes: set[str]) -> None:
    check(example, plain, example.make_mesh({axis: 1 + (axis in axes) for axis in AXES}), 2 if "pp" in axes else 1)


@pytest.mark.usefixtures("simulated")
def test_a_stage_needs_layers(example: ModuleType) -> None:
    with pytest.raises(ValueError, match="3 stages need as many layers, got 2"):
        example.Llama(example.Config(), dtorch.init_device_mesh("cpu", 3, ("pp",)))


@pytest.mark.usefixtures("simulated")
def test_where_parameters_are(example: ModuleType) -> None:
    model = example.Llama(example.Config(), dtorch.init_device_mesh("cpu", (2, 2), ("pp", "tp")))
    block = model.blocks[1]
    assert block.attention.query.weight.placements == [Shard(0)]
    assert block.attention.out.weight.placements == [Shard(1)]
    assert block.attention_norm.weight.placements == [Replicate()]
    assert block.attention_norm.weight.device_mesh.device_ids == (2, 3)


#: How twenty steps are trained: the mesh, and the plan if it is not the model's own.
TRAINED: dict[str, tuple[dict[str, int], dict[str, Any] | None]] = {
    "data parallel": ({"dp": 2}, None),
    "fully sharded": ({"dp": 2}, {"*": {"dp": Shard(0)}}),
    "tensor parallel": ({"tp": 2}, None),
    "both": ({"dp": 2, "tp": 2}, None),
}


def curve(model: torch.nn.Module, batches: list[torch.Tensor]) -> list[float]:
    """The losses of steps of AdamW on the next token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches:
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


@pytest.mark.usefixtures("workers")
def test_twenty_steps_of_training(example: ModuleType, plain: tuple) -> None:
    """However it is placed, on real workers, the loss follows that of one device."""
    config = plain[0].config
    torch.manual_seed(1)
    alone = example.Llama(config)
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    batches = list(torch.randint(24, (4, 4, 9)).repeat(5, 1, 1))
    expected = curve(alone, batches)
    assert len(expected) == 20
    assert expected[-1] < expected[0] - 0.5
    for way, (sizes, plan) in TRAINED.items():
        mesh = example.make_mesh(dict.fromkeys(AXES, 1) | sizes)
        model = example.Llama(config, mesh)
        model.load_state_dict(start)
        if plan is not None:
            dtorch.distribute_module(model, mesh, plan)
        where = [Shard(0) if name == "dp" else Replicate() for name in mesh.mesh_dim_names]
        found = curve(model, [dtorch.from_torch(tokens, mesh, where) for tokens in batches])
        assert found == pytest.approx(expected, abs=1e-4), way


#: Names here and in transformers.
NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    **{f"attention.{ours}": f"self_attn.{theirs}_proj" for ours, theirs in zip(("query", "key", "value", "out"), "qkvo", strict=True)},
    **{f"feed_forward.{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}  # fmt: skip


def test_it_is_llama(plain: tuple) -> None:
    """In plain torch, with the same weights, its logits are those of transformers' Llama."""
    transformers = pytest.importorskip("transformers")
    model, ids, _, expected = plain
    ours = model.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=ours.vocabulary,
            hidden_size=ours.width,
            intermediate_size=ours.hidden,
            num_hidden_layers=ours.layers,
            num_attention_heads=ours.heads,
            num_key_value_heads=ours.kv_heads,
            rms_norm_eps=1e-5,
        )
    )
    state = {}
    for name, value in model.state_dict().items():
        rest = name.removesuffix(".weight").removeprefix("blocks.")
        number, _, part = rest.partition(".") if name.startswith("blocks.") else ("", "", rest)
        state[(f"model.layers.{number}." if number else "") + NAMES[part] + ".weight"] = value
    theirs.load_state_dict(state)
    torch.testing.assert_close(theirs(ids).logits.detach(), expected.logits)
