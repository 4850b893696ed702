"""`distribute_module`: the tensors of a module onto a mesh, by a plan."""

from __future__ import annotations

import logging
import weakref
from weakref import WeakKeyDictionary

import torch

from .. import creation, hints
from ..mesh import DeviceMesh
from ..placement import PlacementList
from ..placing import distribute_tensor
from ..tensor import Tensor
from .auto import auto_plan
from .holdings import Held, held_by
from .plans import Plan, resolve

log = logging.getLogger("dtorch")

#: What was reported of each module, for its `summary`.
NOTES: WeakKeyDictionary[torch.nn.Module, list[str]] = WeakKeyDictionary()


@hints.takes
def distribute_module(module: torch.nn.Module, mesh: DeviceMesh, plan: Plan | str | None = None) -> torch.nn.Module:
    """Put the parameters and buffers of ``module`` on ``mesh``, as ``plan`` says; nothing else of it changes.

    Parameters stay the same objects where Python allows it (an optimizer built before goes on with them), tied ones stay tied, and
    ``requires_grad`` and gradients are kept. Those on the meta device become tensors on the workers without values of their own,
    ready for ``load_state_dict``.

    Args:
        module: any module; its tensors may be plain, on the meta device, or dtorch tensors already.
        mesh: where to.
        plan: nothing, to replicate all; or a dict of globs of parameter names (``"layers.*.up.weight"``; ``*`` matches dots too) to
            placements: a list, one per mesh axis, or a dict by axis name, ``{"tp": Shard(0)}``, where axes not named replicate. The
            first glob that matches wins, what none matches is replicated. A glob that matches parameters says nothing of buffers; a
            tensor without dims is always replicated. A dict by axis name may name the axes
            ``dp tp pp ulysses_cp ring_cp`` though the mesh lacks them.
            ``"auto"`` takes the tensor-parallel plan of the model itself (Hugging Face's ``tp_plan``) along the axis ``tp``, or the
            only axis of a mesh without names. A projection whose heads the axis does not divide is replicated; so is all of the
            model, on a mesh whose names lack ``tp``.

    Returns:
        ``module``.

    Raises:
        ValueError: a glob that matches nothing, an axis that the mesh lacks, a dim that the tensor lacks, more placements than axes,
            a model without a plan of its own. Each says what is near. Nothing has been placed then.
        TypeError: arguments, or tensors of a kind, that cannot be placed.
        RuntimeError: the autograd graph of an earlier forward still holds a parameter; the call may be repeated.
        DeviceUnavailable: a device that does not exist here.

    What was decided where the plan could not be followed is logged, and listed by `summary`.

    Example::

        >>> mesh = DeviceMesh("cpu", [0, 1], ("tp",))
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> plan = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}
        >>> [p.placements for p in distribute_module(mlp, mesh, plan).parameters()]
        [[Shard(dim=0)], [Shard(dim=0)], [Shard(dim=1)], [Replicate()]]
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"distribute_module(): argument 'module' must be a torch.nn.Module, not {type(module).__name__}"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"distribute_module(): argument 'mesh' must be a DeviceMesh, not {type(mesh).__name__}")
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise TypeError(
            "distribute_module(): a TorchScript module runs on plain tensors only; place the module that it was made of"
        )
    plan = {} if plan is None else plan
    held = held_by(module)
    for one in held:
        _check(one)
    notes: list[str] = []
    if plan == "auto":
        plan, notes = auto_plan(module, held, mesh)
    if isinstance(plan, str) or not hasattr(plan, "items"):
        raise TypeError(
            f"distribute_module(): argument 'plan' must be a dict of parameter-name globs to placements, or 'auto', got {plan!r}"
        )
    placements, more = resolve(held, mesh, plan)
    notes += more
    lost = [one.name for one in held if one.tensor.is_meta and not one.persistent]
    if lost:
        notes.append(f"buffers made on the meta device that no state dict fills, set them yourself: {', '.join(lost)}")
    for one, where in zip(held, placements, strict=True):
        _place(one, mesh, where)
    NOTES[module] = notes
    from ..integrations import transformers  # with the reading and writing of weights, which most programs do without

    transformers.keep_saving(module)
    for note in notes:
        log.warning("distribute_module: %s", note)
    return module


def _check(one: Held) -> None:
    tensor = one.tensor
    if isinstance(tensor, Tensor):
        return
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"distribute_module(): {one.name!r} is a {type(tensor).__name__}, which cannot be placed"
            + ("; call the module once first" if torch.nn.parameter.is_lazy(tensor) else "")
        )
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise TypeError(f"distribute_module(): {one.name!r} has hooks, which would be lost; register them afterwards")


def _place(one: Held, mesh: DeviceMesh, placements: PlacementList) -> None:
    tensor = one.tensor
    if tensor.is_meta:
        placed = creation.empty(tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=placements)
        if tensor.stride() != placed.stride():
            placed = placed.as_strided(tensor.shape, tensor.stride())
    else:
        placed = distribute_tensor(tensor.detach(), mesh, placements)
    gradient, tensor.grad = tensor.grad, None
    if isinstance(tensor, Tensor) or not weakref.getweakrefs(tensor):
        attributes = dict(vars(tensor))
        try:
            tensor.data = placed
        except RuntimeError as error:
            raise RuntimeError(
                f"distribute_module(): {one.name!r} is in use by an autograd graph; drop the loss that holds it, and call again"
            ) from error
        vars(tensor).update({name: value for name, value in attributes.items() if name not in vars(tensor)})
    else:  # Python cannot change what others look at by a weak reference: the parameters of torch.nn.LSTM, for one
        tensor = torch.nn.Parameter(placed, tensor.requires_grad) if one.is_parameter else placed
        for owner, name in one.owners:
            setattr(owner, name, tensor)
    if gradient is not None:
        tensor.grad = distribute_tensor(gradient.detach(), mesh, placements)
