"""Reinforcement learning in one script: an actor makes rollouts on one mesh while a learner updates on another.

The actor lives whole on device 0; the learner's weights are split over devices 1 and 2. After every update the weights go from the one
placement to the other by ``redistribute``. Nothing waits: while the learner works on the last batch the actor makes the next one, and
Python only awaits the mean reward, which it prints.

    python3 examples/rollout_update.py [--steps 120] [--plot reward.png]
"""

from __future__ import annotations

import argparse
import asyncio
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

import dtorch

ACTOR = dtorch.DeviceMesh("cpu", [0])
LEARNER = dtorch.DeviceMesh("cpu", [1, 2], ("fsdp",))
FEATURES, ACTIONS, BATCH = 8, 4, 256


class Rollout(NamedTuple):
    """One batch of situations, what the actor did, and what it got for it."""

    states: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, ACTIONS))


def play(actor: nn.Module, world: torch.Tensor) -> Rollout:
    """The right action in a state is the one that ``world`` scores highest; it earns 1."""
    with torch.no_grad():
        states = dtorch.randn(BATCH, FEATURES, device_mesh=ACTOR)
        actions = torch.distributions.Categorical(logits=actor(states)).sample()
        rewards = (actions == (states @ world).argmax(-1)).float()
    return Rollout(states, actions, rewards)


def update(learner: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout) -> None:
    """One step of REINFORCE (Williams, 1992), with the batch's mean reward as the baseline."""
    states, actions, rewards = (x.redistribute(LEARNER, [dtorch.Shard(0)]) for x in rollout)
    chosen = torch.distributions.Categorical(logits=learner(states)).log_prob(actions)
    loss = -(chosen * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def push(learner: nn.Module, actor: nn.Module) -> None:
    """The actor's weights become the learner's: from shards on one mesh to whole tensors on another."""
    with torch.no_grad():
        for mine, theirs in zip(actor.parameters(), learner.parameters(), strict=True):
            mine.copy_(theirs.redistribute(ACTOR, [dtorch.Replicate()]))


async def train(steps: int) -> list[float]:
    """The mean reward of each step."""
    dtorch.manual_seed(0)
    learner, actor = policy(), policy()
    dtorch.distribute_module(learner, LEARNER, {"*": {"fsdp": dtorch.Shard(0)}})
    dtorch.distribute_module(actor, ACTOR)
    optimizer = torch.optim.Adam(learner.parameters(), lr=2e-2)
    world = dtorch.randn(FEATURES, ACTIONS, device_mesh=ACTOR)

    push(learner, actor)
    rewards: list[float] = []
    rollout = play(actor, world)
    for _ in (bar := tqdm(range(steps), desc="reward ?")):
        coming = play(actor, world)  # on device 0, while
        update(learner, optimizer, rollout)  # devices 1 and 2 learn from the batch before
        push(learner, actor)
        rewards.append(float(await rollout.rewards.mean().to_torch_async()))
        bar.set_description(f"reward {rewards[-1]:.2f}")
        rollout = coming
    return rewards


def plot(rewards: list[float], path: str) -> None:
    import matplotlib.pyplot as plt

    plt.figure(figsize=(6, 3.5))
    plt.plot(rewards)
    plt.axhline(1 / ACTIONS, linestyle=":", color="grey", label="chance")
    plt.xlabel("update")
    plt.ylabel("mean reward")
    plt.legend()
    plt.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--plot", metavar="FILE", help="write the reward curve there (needs matplotlib)")
    arguments = parser.parse_args()
    rewards = asyncio.run(train(arguments.steps))
    last = rewards[-10:]
    print(f"mean reward: {rewards[0]:.2f} at first, {sum(last) / len(last):.2f} over the last {len(last)} updates")
    if arguments.plot:
        plot(rewards, arguments.plot)
        print(f"wrote {arguments.plot}")


if __name__ == "__main__":
    main()
