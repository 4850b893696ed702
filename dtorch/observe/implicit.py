"""`set_implicit_communication`: whether dtorch may move tensors that nobody asked it to move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import hints
from ..client import inserted, lines
from ..errors import ImplicitCommunication
from ..sharding import transfer
from ..sharding.rules import rule_for
from ..sharding.spec import Spec
from ..sharding.strategy import Call, Group
from . import recording

MODES = ("allow", "warn", "error")
#: Strategies that a message lists at most.
LISTED = 6


class set_implicit_communication:
    """Say what happens when an op needs a tensor elsewhere than it is, and moving it communicates.

    Args:
        mode: ``"allow"`` (the default), ``"warn"``, or ``"error"``: then the call raises `errors.ImplicitCommunication`, which names the
            op, the placements met, the placements it accepts, and the user's line; nothing has run. So does an op for which an
            earlier one's copy would do: what is refused does not depend on what ran before. What the program asks for by
            ``redistribute``, reads of values, and gradients on their way to their leaf's placements are not implicit. A function of
            `compile` is recorded anew in another mode: it warns, or raises, as it would op by op, then.

    Raises:
        ValueError: another mode.

    Example::

        >>> x = dtorch.ones(4, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
        >>> with set_implicit_communication("error"):
        ...     try:
        ...         y = x.cumsum(0)
        ...     except dtorch.errors.ImplicitCommunication as error:
        ...         print(str(error).splitlines()[1])
          input 0: shape (4,), [Shard(dim=0)]
    """

    @hints.takes
    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(
                f"set_implicit_communication(): mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}"
            )
        self._before = inserted.mode
        inserted.mode = mode

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        inserted.mode = self._before


def _told(name: str, specs: list[Spec], moves: Sequence[tuple[Spec, Spec]], gathered: bool, call: Call | None) -> None:
    if inserted.mode != "allow":
        _object(name, specs, moves, call)
    if gathered:
        for one in recording.ACTIVE:
            one._gathered(name, specs)


def _object(name: str, specs: list[Spec], moves: Sequence[tuple[Spec, Spec]], call: Call | None) -> None:
    """Warn of moves that communicate, or raise."""
    moved = [
        (source, target)
        for source, target in moves
        if transfer.kind(source.mesh, source.placements, target.mesh, target.placements, tuple(source.shape)) != "local"
    ]
    if not moved:
        return
    message = _message(name, call, specs, moved)
    if inserted.mode == "error":
        raise ImplicitCommunication(message)
    lines.warn(message)


def _message(name: str, call: Call | None, specs: list[Spec], moved: list[tuple[Spec, Spec]]) -> str:
    told = [f"{name} needs communication that the program does not ask for, at {lines.here()}"]
    meshes = {spec.mesh for spec in specs}

    def where(spec: Spec) -> str:
        return str(spec.placements) if len(meshes) == 1 else f"{spec.placements} on {spec.mesh}"

    told += [f"  input {i}: shape {tuple(spec.shape)}, {where(spec)}" for i, spec in enumerate(specs)]
    told += [f"  would move {tuple(s.shape)} from {where(s)} to {where(t)}" for s, t in moved]
    accepted = [] if call is None else _accepted(call)
    if accepted:
        told.append("  accepted on each mesh axis: " + "; or ".join(accepted))
    how = "placements=[...]" if len(meshes) == 1 else "device_mesh=other.device_mesh"
    told.append(f"  bring it there by x.redistribute({how}), or allow it: set_implicit_communication('allow')")
    return "\n".join(told)


def _accepted(call: Call) -> list[str]:
    """The placements of the inputs that the op's rule accepts along one axis, the first few."""
    entry = rule_for(call.op)
    found = [] if entry is None else list(entry.rule(call))
    each: list[Any] = [s for one in found for s in (one.strategies if isinstance(one, Group) else [one])]
    texts = list(dict.fromkeys(", ".join(map(str, strategy.inputs)) for strategy in each))
    texts.append("all Replicate()")
    return texts if len(texts) <= LISTED else [*texts[:LISTED], "…"]


inserted.before_moves.append(_told)
