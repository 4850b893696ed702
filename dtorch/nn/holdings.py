"""What a module holds: each of its tensors once, with all its names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Held:
    """A parameter or buffer of a module."""

    tensor: torch.Tensor
    is_parameter: bool
    #: Every name it has; more than one if it is tied.
    names: list[str] = field(default_factory=list)
    #: For each name, the submodule that holds it and the name it has there.
    owners: list[tuple[torch.nn.Module, str]] = field(default_factory=list)
    #: Whether a state dict has it.
    persistent: bool = True

    @property
    def name(self) -> str:
        return self.names[0]


def held_by(module: torch.nn.Module) -> list[Held]:
    """The tensors of a module, parameters before buffers within each submodule, in the module's order."""
    found: dict[int, Held] = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for tensors, is_parameter in ((part._parameters, True), (part._buffers, False)):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                held = found.setdefault(id(tensor), Held(tensor, is_parameter))
                held.names.append(f"{prefix}.{name}" if prefix else name)
                held.owners.append((part, name))
                held.persistent = is_parameter or name not in part._non_persistent_buffers_set
    return list(found.values())
