"""Pipeline parallelism: the layers of a model on several meshes, one after the other, and micro-batches that go through them at the
same time.

A stage is a module whose parameters are on one mesh, usually one of ``mesh.unbind("pp")``. Nothing waits in dtorch, so a loop over
micro-batches pipelines by itself where each goes through the whole model: stage 0 computes the second while stage 1 computes the
first. ``loss.backward()`` in it issues the backward of all stages at once. 1F1B alternates the forward of one micro-batch with the
backward of another on each stage, so forwards and backwards must be issued stage by stage. For that a stage's input is a leaf,
cut off from the stage before (`stage_input`), and the gradient that reaches it is handed on as that of the stage before's output
(`stage_backward`). `run` is the loop that does so, for any order of steps.

Each worker runs what concerns it in the order of issue. So activations and gradients are sent in steps of their own: at once when they are
made, and not before their receiver, which waits for them there, has been given what it can compute meanwhile.

GPipe: https://arxiv.org/abs/1811.06965. 1F1B, there PipeDream-Flush: https://arxiv.org/abs/2006.09503; with the names used here,
Megatron-LM: https://arxiv.org/abs/2104.04473.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from . import hints
from .client import lines
from .errors import MeshMismatch
from .mesh import DeviceMesh
from .placement import REPLICATE, settled
from .tensor import Tensor

#: What a step does. ``send_forward``: the stage's output goes to the next stage; ``send_backward``: its input's gradient to the one before.
KINDS = ("forward", "send_forward", "backward", "send_backward")

#: A stage and a micro-batch.
Key = tuple[int, int]

#: How long the clock behind the order of steps takes a forward and a backward to be, which computes two gradients of each product.
CLOCK = {"forward": 1, "backward": 2}


class Step(NamedTuple):
    """One thing to issue: ``kind`` is one of `KINDS`."""

    kind: str
    stage: int
    micro_batch: int


@hints.takes
def gpipe(num_stages: int, num_micro_batches: int) -> Iterator[Step]:
    """The steps of GPipe: all forwards, then all backwards. Each stage keeps the activations of all micro-batches.

    Args:
        num_stages, num_micro_batches: each at least 1.

    Raises:
        TypeError, ValueError: no int, or less than 1.

    Example::

        >>> [(kind, i) for kind, stage, i in pipeline.gpipe(2, 3) if stage == 0 and "send" not in kind]
        [('forward', 0), ('forward', 1), ('forward', 2), ('backward', 0), ('backward', 1), ('backward', 2)]
    """
    _check_counts("gpipe", num_stages, num_micro_batches)
    numbers = range(num_micro_batches)
    yield from _by_clock([[("forward", i) for i in numbers] + [("backward", i) for i in numbers]] * num_stages)


@hints.takes
def one_f_one_b(num_stages: int, num_micro_batches: int) -> Iterator[Step]:
    """The steps of 1F1B: a stage runs as many forwards as there are stages behind it, then one forward and one backward in turn.

    It takes as long as `gpipe`, (m + p - 1)(forward + backward) for m micro-batches on p equal stages, and no stage keeps the
    activations of more than p micro-batches.

    Args:
        num_stages, num_micro_batches: each at least 1.

    Raises:
        TypeError, ValueError: no int, or less than 1.

    Example::

        >>> [(kind, i) for kind, stage, i in pipeline.one_f_one_b(2, 3) if stage == 0 and "send" not in kind]
        [('forward', 0), ('forward', 1), ('backward', 0), ('forward', 2), ('backward', 1), ('backward', 2)]
    """
    _check_counts("one_f_one_b", num_stages, num_micro_batches)
    orders = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_micro_batches)
        order = [("forward", i) for i in range(ahead)]
        for i in range(num_micro_batches - ahead):
            order += [("forward", ahead + i), ("backward", i)]
        orders.append(order + [("backward", i) for i in range(num_micro_batches - ahead, num_micro_batches)])
    yield from _by_clock(orders)


def _by_clock(orders: list[list[tuple[str, int]]]) -> Iterator[Step]:
    """One sequence of what each stage is to compute in an order of its own: as it would happen by a clock, a send as soon as it can be."""
    last = len(orders) - 1
    events: list[tuple[int, bool, Step]] = []
    finished: dict[Step, int] = {}
    free = [0] * len(orders)
    left = [iter(order) for order in orders]
    following = [next(steps, None) for steps in left]
    while any(following):
        for stage, at in enumerate(following):
            if at is None:
                continue
            step = Step(at[0], stage, at[1])
            needed = _needed(step, last)
            if needed is not None and needed not in finished:
                continue
            start = max(free[stage], finished.get(needed, 0))  # type: ignore[arg-type]
            free[stage] = finished[step] = start + CLOCK[step.kind]
            events.append((start, True, step))
            if stage != (last if step.kind == "forward" else 0):
                events.append((free[stage], False, step._replace(kind=f"send_{step.kind}")))
            following[stage] = next(left[stage], None)
    for _, _, step in sorted(events, key=lambda event: event[:2]):  # at one time sends come first
        yield step


def _needed(step: Step, last: int) -> Step | None:
    """The step of another stage, or the forward, without which this one cannot run."""
    if step.kind == "forward":
        return None if step.stage == 0 else Step("forward", step.stage - 1, step.micro_batch)
    if step.stage == last:
        return Step("forward", last, step.micro_batch)
    return Step("backward", step.stage + 1, step.micro_batch)


@hints.takes
def mesh_of(stage: torch.nn.Module) -> DeviceMesh | None:
    """The mesh that the parameters and buffers of a stage are on; None: they are plain tensors.

    Raises:
        TypeError: not a module.
        ValueError: a stage without layers, or with plain parameters beside placed ones.
        MeshMismatch: parameters on different meshes.
    """
    if not isinstance(stage, torch.nn.Module):
        raise TypeError(f"a pipeline stage must be a torch.nn.Module, not {type(stage).__name__}")
    held = [*stage.named_parameters(), *stage.named_buffers()]
    if not held:
        raise ValueError(
            f"a stage without layers: {_short(stage)} has no parameters, so no mesh to run on; "
            "dtorch.assign_layers_to_stages(num_layers, num_stages) gives every stage some"
        )
    found: dict[DeviceMesh | None, str] = {}
    for name, tensor in held:
        found.setdefault(tensor.device_mesh if isinstance(tensor, Tensor) else None, name)
    if len(found) > 1:
        (mesh, name), (other, odd) = list(found.items())[:2]
        if mesh is None or other is None:
            plain, placed = (name, odd) if mesh is None else (odd, name)
            raise ValueError(
                f"{_short(stage)} has plain parameters ({plain!r}) and placed ones ({placed!r}); "
                "make the whole stage under dtorch.default_mesh(mesh), or place it with dtorch.distribute_module"
            )
        raise MeshMismatch(
            f"the parameters of one stage are on different meshes: {name!r} on {mesh}, {odd!r} on {other}"
        )
    return next(iter(found))


@hints.takes
def to_stage(x: Any, stage: torch.nn.Module) -> Any:
    """``x`` on the mesh of ``stage``, differentiable: what a whole-model forward does between stages.

    Axes of the same name keep their placement, others replicate, and pending sums are completed. A plain tensor is returned as it is,
    and so is one that is there.

    Raises:
        TypeError, ValueError, MeshMismatch: ``x`` is no tensor; as `mesh_of`.

    Example::

        >>> first, second = init_device_mesh("cpu", (2, 2), ("pp", "tp")).unbind("pp")
        >>> x = ones(4, 2, device_mesh=first, placements=[Shard(0)])
        >>> moved = pipeline.to_stage(x, dtorch.nn.Linear(2, 2, device_mesh=second))
        >>> moved.device_mesh, moved.placements
        (DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',)), [Shard(dim=0)])
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"to_stage(): argument 'x' must be a tensor, not {type(x).__name__}")
    mesh = mesh_of(stage)
    return _to_mesh(x, mesh) if isinstance(x, Tensor) and mesh is not None else x


@hints.takes
def stage_input(x: torch.Tensor, stage: torch.nn.Module) -> torch.Tensor:
    """`to_stage`, cut off from what made ``x``: a leaf in which a stage's backward leaves the gradient. (Ids, being ints, get none.)

    Example::

        >>> x = torch.ones(2, 3, requires_grad=True) * 2
        >>> pipeline.stage_input(x, torch.nn.Linear(3, 3)).is_leaf
        True
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"stage_input(): argument 'x' must be a tensor, not {type(x).__name__}")
    moved = to_stage(x.detach(), stage)
    return moved.requires_grad_(moved.is_floating_point() or moved.is_complex())


@hints.takes
def stage_backward(
    output: torch.Tensor, grad: torch.Tensor | None = None, input: torch.Tensor | None = None
) -> torch.Tensor | None:
    """The backward of one stage alone; gradients are added to those of its parameters.

    Args:
        output: what the stage made of one micro-batch; the loss, on the last stage.
        grad: the gradient of ``output``, from the stage behind, on the mesh of ``output`` (`send_backward`); None for a loss.
        input: what the stage was given, from `stage_input`.

    Returns:
        The gradient of ``input``, of its shape and dtype; None without ``input`` or for one of ints. It is not kept in ``input.grad``.

    Raises:
        TypeError: arguments that are no tensors.
        ValueError: ``grad`` of another shape than ``output``; ``input`` no leaf, so that no gradient is left in it; no ``grad`` for an
            output that is no loss, of one element.
        MeshMismatch: ``grad`` on another mesh than ``output``: left on the stage that it comes from.

    Example::

        >>> stage = torch.nn.Linear(3, 1)
        >>> x = pipeline.stage_input(torch.ones(2, 3), stage)
        >>> torch.equal(pipeline.stage_backward(stage(x), torch.ones(2, 1), x), stage.weight.detach().expand(2, 3))
        True
    """
    for name, value in (("output", output), ("grad", grad), ("input", input)):
        if not isinstance(value, torch.Tensor) and (value is not None or name == "output"):
            raise TypeError(f"stage_backward(): argument {name!r} must be a tensor, not {type(value).__name__}")
    if grad is None and output.numel() != 1:
        raise ValueError(
            f"stage_backward(): argument 'grad' is needed for an output of shape {tuple(output.shape)}; "
            "only a loss, of one element, has none"
        )
    if grad is not None:
        if grad.shape != output.shape:
            raise ValueError(
                f"stage_backward(): grad has shape {tuple(grad.shape)}, and output, whose gradient it is, {tuple(output.shape)}"
            )
        _check_mesh("stage_backward(): grad", grad, "output", _placed_on(output))
    if input is not None and not input.is_leaf:
        raise ValueError("stage_backward(): input must be a leaf; cut it off from the stage before with stage_input()")
    torch.autograd.backward(output, grad)
    if input is None or input.grad is None:
        return None
    found, input.grad = input.grad, None
    return found


@hints.takes
def send_backward(grad: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The gradient of a stage's input, brought to where the stage before has the ``output`` that the input was made of."""
    mesh = _placed_on(output)
    return _to_mesh(grad, mesh) if isinstance(grad, Tensor) and mesh is not None else grad


@hints.takes
def run(
    steps: Iterable[Step],
    stages: Sequence[torch.nn.Module],
    inputs: Sequence[torch.Tensor],
    targets: Sequence[Any],
    loss_fn: Callable[[torch.Tensor, Any], torch.Tensor],
) -> list[torch.Tensor]:
    """Issue ``steps``: forward and backward of every micro-batch through every stage. Nothing waits.

    Args:
        steps: from `one_f_one_b` or `gpipe`, or an order of your own; ``tqdm`` may be around it.
        stages: modules of one tensor to one tensor, each on one mesh. On one and the same mesh, or in plain torch, it is
            gradient accumulation.
        inputs: one per micro-batch, on the mesh of the first stage.
        targets: one per micro-batch, on the mesh of the last stage if it is a tensor.
        loss_fn: called with the last stage's output and the target; gives a loss of one element. Gradients of all micro-batches are
            added up: divide here by their number for the mean.

    Returns:
        The losses, detached, one per micro-batch.

    Raises:
        TypeError, ValueError: no stages, a stage without layers, another number of targets than of inputs, a tensor in place of a list
            of them, a step that the stages do not have, a micro-batch that no step runs.
        MeshMismatch: a tensor on the mesh of another stage.

    Example::

        >>> first, second = init_device_mesh("cpu", (2,), ("pp",)).unbind("pp")
        >>> stages = [dtorch.nn.Linear(4, 4, device_mesh=first), dtorch.nn.Linear(4, 1, device_mesh=second)]
        >>> xs = [ones(2, 4, device_mesh=first)] * 4
        >>> ys = [ones(2, 1, device_mesh=second)] * 4
        >>> len(pipeline.run(pipeline.one_f_one_b(2, 4), stages, xs, ys, dtorch.nn.functional.mse_loss))
        4
    """
    stages = list(stages)
    _check_run(stages, inputs, targets)
    last = len(stages) - 1
    given: dict[Key, torch.Tensor] = {(0, i): x for i, x in enumerate(inputs)}
    made: dict[Key, torch.Tensor] = {}
    arrived: dict[Key, torch.Tensor | None] = {(last, i): None for i in range(len(inputs))}
    grads: dict[Key, torch.Tensor | None] = {}
    losses: list[Any] = [None] * len(inputs)
    ready: dict[str, list[dict[Key, Any]]] = {
        "forward": [given],
        "send_forward": [made],
        "backward": [made, arrived],
        "send_backward": [grads],
    }
    for kind, stage, i in steps:
        if kind not in KINDS:
            raise ValueError(f"run(): the kind of a step must be one of {KINDS}, got {kind!r}")
        at = (stage, i)
        if not all(at in table for table in ready[kind]) or at == (last if kind == "send_forward" else None, i):
            raise ValueError(
                f"run(): cannot run {Step(kind, stage, i)} with {len(stages)} stages and {len(inputs)} micro-batches: there is "
                "no such stage or micro-batch, or a step that it needs has not been run, or its results are used up"
            )
        if kind == "forward":
            made[at] = stages[stage](given[at])
            if stage == last:
                made[at] = loss_fn(made[at], targets[i])
                losses[i] = made[at].detach()
        elif kind == "send_forward":
            given[stage + 1, i] = stage_input(made[at], stages[stage + 1])
        elif kind == "backward":
            x = given.pop(at)
            grads[at] = stage_backward(made.pop(at), arrived.pop(at), x if stage else None)
        else:
            arrived[stage - 1, i] = send_backward(grads.pop(at), made[stage - 1, i])  # type: ignore[arg-type]
    left = [i for i, loss in enumerate(losses) if loss is None]
    if left:
        raise ValueError(f"run(): the steps leave out micro-batches {left} of {len(inputs)}")
    return losses


def _check_run(stages: list[torch.nn.Module], inputs: Sequence[torch.Tensor], targets: Sequence[Any]) -> None:
    if not stages:
        raise ValueError("run(): there are no stages")
    for what, given in (("inputs", inputs), ("targets", targets)):
        if isinstance(given, torch.Tensor):
            raise TypeError(
                f"run(): {what} must be a list with one tensor per micro-batch; split the tensor: x.chunk(4)"
            )
    if len(inputs) != len(targets):
        raise ValueError(f"run(): {len(inputs)} inputs and {len(targets)} targets; give one of each per micro-batch")
    meshes = []
    for number, stage in enumerate(stages):
        try:
            meshes.append(mesh_of(stage))
        except (TypeError, ValueError) as error:
            raise type(error)(f"run(): stages[{number}]: {error}") from None
    for what, tensors, number in (("inputs", inputs, 0), ("targets", targets, len(stages) - 1)):
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor):
                _check_mesh(f"run(): {what}[{i}]", tensor, f"stage {number}, which takes it,", meshes[number])


def _check_mesh(what: str, tensor: torch.Tensor, needs: str, mesh: DeviceMesh | None) -> None:
    """A tensor on the wrong stage is an error. Plain and uncommitted ones join whatever they meet."""
    found = _placed_on(tensor)
    if found is not None and mesh is not None and found != mesh:
        raise lines.with_line(
            MeshMismatch(
                f"{what} is on {found}, and {needs} on {mesh}. Bring it there: x.redistribute(device_mesh=...)"
            )
        )


def _placed_on(tensor: torch.Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, Tensor) and tensor._spec is not None else None


def _to_mesh(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """By axis names; without names by position where the meshes are of one shape."""
    own = x.device_mesh
    if own.shape == mesh.shape and own.mesh_dim_names == mesh.mesh_dim_names:
        kept = list(x.placements)
    else:
        names = mesh.mesh_dim_names or (None,) * mesh.ndim
        axes = [None if name is None else own.dim_name_index(name) for name in names]
        kept = [REPLICATE if axis is None else x.placements[axis] for axis in axes]
    return x.redistribute(mesh, settled(kept))


def _check_counts(name: str, num_stages: int, num_micro_batches: int) -> None:
    for what, value in (("num_stages", num_stages), ("num_micro_batches", num_micro_batches)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}(): argument {what!r} must be int, not {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name}(): {what} must be at least 1, got {value}")


def _short(stage: torch.nn.Module) -> str:
    return f"{type(stage).__name__}()" if not list(stage.children()) else type(stage).__name__
