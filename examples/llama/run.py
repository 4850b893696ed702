"""One training step of a small Llama on a mesh, beside the same step on one device in plain torch.

    python examples/llama/run.py --dp 2 --tp 2 --ring 2 --engine simulate

Prints where the parameters are, what was communicated, and how far logits, loss and every gradient are from plain torch's.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from model import Config, Llama
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import dtorch
from dtorch import Replicate, Shard, pipeline

#: The axes of a mesh, in order.
AXES = ("dp", "tp", "pp", "ulysses_cp", "ring_cp")
#: What splits ids (batch, length): data parallelism the batch, context parallelism the length.
SPLIT = {"dp": Shard(0), "ulysses_cp": Shard(1), "ring_cp": Shard(1)}
#: For logits, loss and gradients in float32.
TOLERANCE = 1e-5


def make_mesh(sizes: dict[str, int]) -> dtorch.DeviceMesh:
    """The axes of more than one device; one device where there are none."""
    used = {axis: sizes[axis] for axis in AXES if sizes[axis] > 1} or {"dp": 1}
    return dtorch.init_device_mesh("cpu", tuple(used.values()), tuple(used))


@dataclass
class Result:
    """Of one step on the whole batch."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


def gradients(model: Llama) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def alone(model: Llama, ids: Tensor, targets: Tensor) -> Result:
    """On one device."""
    logits = model(ids)
    loss = cross_entropy(logits.transpose(1, 2), targets)
    loss.backward()
    return Result(logits.detach(), loss.detach(), gradients(model))


def on_mesh(model: Llama, ids: Tensor, targets: Tensor, micro_batches: int, progress: bool = False) -> Result:
    """On the mesh that the model is on, by micro-batches, which the stages of the pipeline work on at the same time (1F1B)."""
    first, last = pipeline.mesh_of(model.stages[0]), pipeline.mesh_of(model.stages[-1])

    def placed(x: Tensor, mesh: dtorch.DeviceMesh) -> list[Tensor]:
        placed = [dtorch.from_torch(part, mesh) for part in x.chunk(micro_batches)]
        return [part.redistribute_by_dict(placements_dict=SPLIT, default_placement_mode="replicate") for part in placed]

    logits = []

    def loss_of(out: Tensor, target: Tensor) -> Tensor:
        logits.append(out.detach())
        return cross_entropy(out.transpose(1, 2), target) / micro_batches

    steps = list(pipeline.one_f_one_b(len(model.stages), micro_batches))
    bar = tqdm(steps, "forward and backward", disable=not progress)
    losses = pipeline.run(bar, model.stages, placed(ids, first), placed(targets, last), loss_of)
    whole = torch.cat([part.redistribute(placements=[Replicate()] * last.ndim) for part in logits])
    return Result(whole, sum(losses), gradients(model))


def differences(found: Result, expected: Result, progress: bool = False) -> dict[str, float]:
    """The largest difference in logits, loss and each gradient. Waits for them."""
    ours = {"logits": found.logits, "loss": found.loss, **found.gradients}
    theirs = {"logits": expected.logits, "loss": expected.loss, **expected.gradients}
    bar = tqdm(ours.items(), "comparing", disable=not progress)
    return {name: (value.to_torch() - theirs[name]).abs().max().item() for name, value in bar}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis, what in (
        ("dp", "data parallel: the batch is split"),
        ("tp", "tensor parallel: weights and heads are split"),
        ("pp", "pipeline parallel: the layers are split"),
        ("ulysses", "context parallel: the sequence is split, heads in attention"),
        ("ring", "context parallel: the sequence is split, keys and values travel"),
    ):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{what} N ways")
    parser.add_argument("--micro-batches", type=int, default=4, metavar="N", help="of the batch of 8 (4)")
    parser.add_argument(
        "--engine", choices=("processes", "simulate"), default=None, help="real workers, or this process"
    )
    given = parser.parse_args()
    sizes = {"dp": given.dp, "tp": given.tp, "pp": given.pp, "ulysses_cp": given.ulysses, "ring_cp": given.ring}

    dtorch.init(engine=given.engine)
    torch.manual_seed(0)
    config = Config()
    plain = Llama(config)
    tokens = torch.randint(config.vocabulary, (8, 33))
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    expected = alone(plain, ids, targets)

    model = Llama(config, make_mesh(sizes))
    model.load_state_dict(plain.state_dict())
    print(dtorch.summary(model), end="\n\n")
    with dtorch.record() as recording:
        found = on_mesh(model, ids, targets, given.micro_batches, progress=True)
    print(f"\n{recording.summary()}\n")

    worst = differences(found, expected, progress=True)
    gradient = max(list(worst)[2:], key=worst.__getitem__)
    print(f"\nloss: {found.loss.item():.6f} on the mesh, {expected.loss.item():.6f} on one device")
    print(f"largest difference in logits {worst['logits']:.1e}, in gradients {worst[gradient]:.1e} ({gradient})")
    if max(worst.values()) > TOLERANCE:
        raise SystemExit("the mesh does not agree with one device")


if __name__ == "__main__":
    main()
