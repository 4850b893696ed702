"""One training step of a small model, tensor-parallel over two worker processes, and what ran where.

The first layer's weight is split by output features and the second's by input features, so the hidden activations are never
gathered: the only communication is one sum per direction. Nothing in the model or the loop is special to dtorch.
"""

import torch

import dtorch


class Mlp(torch.nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def step(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = torch.nn.functional.mse_loss(model(x), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def shard(model: torch.nn.Module, mesh: dtorch.DeviceMesh) -> torch.nn.Module:
    """The same modules with their parameters placed on ``mesh``."""
    places = {
        "up.weight": dtorch.Shard(0),
        "up.bias": dtorch.Shard(0),
        "down.weight": dtorch.Shard(1),
        "down.bias": dtorch.Replicate(),
    }
    for name, placement in places.items():
        module, attribute = model.get_submodule(name.split(".")[0]), name.split(".")[1]
        placed = dtorch.distribute_tensor(getattr(module, attribute).detach(), mesh, [placement])
        setattr(module, attribute, torch.nn.Parameter(placed))
    return model


def main() -> None:
    torch.manual_seed(0)
    alone, sharded = Mlp(8, 32), Mlp(8, 32)
    sharded.load_state_dict(alone.state_dict())
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    expected = step(alone, x, target)

    mesh = dtorch.DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
    shard(sharded, mesh)
    replicate = [dtorch.Replicate()]
    loss = step(
        sharded, dtorch.distribute_tensor(x, mesh, replicate), dtorch.distribute_tensor(target, mesh, replicate)
    )

    print(f"one training step on {mesh}")
    for name, parameter in sharded.named_parameters():
        held = ", ".join(f"{device} {tuple(part.shape)}" for device, part in parameter.local_shards().items())
        print(f"  {name:12} {tuple(parameter.shape)!s:9} {parameter.placements!r:18} on {held}")
    print(f"loss: sharded {loss.item():.6f}, on one device {expected.item():.6f}")
    worst = max(
        (a.to_torch() - b).abs().max().item() for a, b in zip(sharded.parameters(), alone.parameters(), strict=True)
    )
    print(f"updated parameters differ from one device's by at most {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the sharded step does not agree with the step on one device")


if __name__ == "__main__":
    main()
