"""Kept copies: a value that one op needed elsewhere is there for the next op that needs it there.

q, k and v are projections of one hidden state, which their weights' gradients need once more, and a norm reads its input twice: what was
gathered or summed for the first need not be again. A copy belongs to the value it was made of and goes with it; it is void once the value
has been written. Views of all its elements (a gradient and its transpose) have it in common: they are taken of it, on each device.
What the backward needs lives until then, however many ops come between: only a budget of bytes is a limit, for copies larger than what they
were made of (the gathered ones) and for others.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any

from ..placement import REPLICATE, settled
from ..sharding.plan import Choice, Plan, completions
from ..sharding.spec import Spec
from . import redistribute, runtime, watch
from .controller import Controller
from .handles import wrap
from .values import COPY, Value, next_value_id

#: Bytes per device that copies of either kind may take.
BYTES = 256 << 20
#: Copies that either kind may note; a value that died leaves the note of its copy.
COUNT = 4096
#: A value whose memory is older than this many values is a weight or an input and not an activation. Its copies are not kept: sharded
#: weights would quietly become replicated ones.
YOUNG = 4096


class Copies:
    """Copies of one kind, the least recently used first. Whoever uses it holds the controller's lock."""

    def __init__(self) -> None:
        self._bytes = 0
        self._recent: collections.OrderedDict[tuple[int, Spec], tuple[weakref.ref[Value], int]] = (
            collections.OrderedDict()
        )

    def used(self, key: tuple[int, Spec]) -> None:
        self._recent.move_to_end(key)

    def add(self, key: tuple[int, Spec], value: Value, newest: int) -> None:
        """Note a copy of ``value``, and drop what no op will find any more, or there is no room for."""
        size = key[1].local_nbytes
        self._recent[key] = weakref.ref(value), size
        self._bytes += size
        while self._recent:
            oldest, (reference, _) = next(iter(self._recent.items()))
            if _is_young(reference(), newest):
                break
            self.drop(oldest)
        if self._bytes > BYTES or len(self._recent) > COUNT:
            for dead in [key for key, (reference, _) in self._recent.items() if reference() is None]:
                self.drop(dead)
            while self._recent and (self._bytes > BYTES or len(self._recent) > COUNT * 3 // 4):
                self.drop(next(iter(self._recent)))

    def drop(self, key: tuple[int, Spec]) -> None:
        reference, size = self._recent.pop(key)
        self._bytes -= size
        value = reference()
        if value is not None and value.kept:
            value.kept.pop(key[1], None)

    def clear(self) -> None:
        self._recent.clear()
        self._bytes = 0


def _is_young(value: Value | None, newest: int) -> bool:
    return value is not None and newest - value.root.born <= YOUNG


_summed, _gathered = Copies(), Copies()


class Uses:
    """The copies that calls of one `Choice` may use, all on tensors of the same specs.

    ``pending``: the inputs with pending sums that are left pending, and where they are completed. ``moved``: those that are moved, and
    where to, if copies of such are kept. ``completed``: see `completions`. ``plan`` runs the op on copies of all that is moved, once known.
    """

    __slots__ = ("pending", "moved", "completed", "plan")

    def __init__(self, choice: Choice, specs: list[Spec]) -> None:
        inputs = list(zip(specs, choice.decision.inputs, strict=True))
        self.pending = [
            (index, spec.with_placements(settled(spec.placements)))
            for index, (spec, placements) in enumerate(inputs)
            if spec.has_partial and placements == spec.placements
        ]
        self.moved = [
            (index, spec.with_placements(placements))
            for index, (spec, placements) in enumerate(inputs)
            if any(a is not b and a is not REPLICATE for a, b in zip(spec.placements, placements, strict=True))
        ]
        self.completed = completions(choice)
        self.plan: Plan | None = None


def summed_before(uses: Uses, tensors: Sequence[Any], controller: Controller) -> list[Any] | None:
    """The tensors with pending sums that are left pending replaced by their kept copies that are completed; None if there is none.

    A residual, whose sum a norm has needed: left pending, because that moves nothing now, it would have to be summed once more.
    """
    found = list(tensors)
    for index, goal in uses.pending:
        value = tensors[index]._value
        if not value.kept or value.kept is COPY:
            continue
        with controller.lock:
            copy, generation = value.kept.get(goal, (None, None))
            recorder = watch.recorder()
            made_before = recorder is not None and copy is not None and copy.id < recorder.floor
            if copy is not None and generation == value.root.generation and not made_before:
                _summed.used((value.id, goal))
                found[index] = wrap(goal, copy)
    return None if all(new is old for new, old in zip(found, tensors, strict=True)) else found


def brought(uses: Uses, tensors: Sequence[Any], why: str, controller: Controller) -> tuple[list[Any], int]:
    """The tensors with those that would be moved replaced by kept copies, made now if need be, and how many those are.

    The op must not write, nor return views: of a copy they would be.
    """
    found = list(tensors)
    newest = next_value_id()
    count = 0
    for index, goal in uses.moved:
        tensor = tensors[index]
        if _is_kept(tensor, newest):
            found[index] = _copy(tensor, goal, why, controller)
            count += 1
    return found, count


def at(tensor: Any, goal: Spec, why: str, controller: Controller) -> Any:
    """A tensor of another mesh at ``goal``: a handle on its kept copy, or on one of its own."""
    if _is_kept(tensor, next_value_id()):
        return _copy(tensor, goal, why, controller)
    return redistribute.move(tensor, goal, why)


def moves_of(choice: Choice, uses: Uses, tensors: Sequence[Any]) -> list[tuple[Spec, Spec]]:
    """The moves of ``choice`` as `brought` will make them: for a view, that of its base."""
    moves = list(choice.moves)
    for index, goal in uses.moved:
        tensor = tensors[index]
        if tensor._value.taken is not None and _is_kept(tensor, next_value_id()):
            moves[moves.index((tensor._spec, goal))] = _moved(tensor, goal)
    return moves


def _moved(tensor: Any, goal: Spec) -> tuple[Spec, Spec]:
    base = _base_to_move(tensor, goal)
    return (tensor._spec, goal) if base is None else _moved(*base)


def _is_kept(tensor: Any, newest: int) -> bool:
    """Whether copies of a tensor are kept."""
    value = tensor._value
    return value.kept is not COPY and not getattr(tensor, "_is_param", False) and _is_young(value, newest)


def _copy(tensor: Any, goal: Spec, why: str, controller: Controller) -> Any:
    """A handle on the kept copy of ``tensor`` at ``goal``."""
    value = tensor._value
    base = _base_to_move(tensor, goal)
    if base is not None:
        view = _view_of_copy(value, base, why, controller)
        if view._spec is goal:
            return view
        value.taken = None  # of the copy it is another view
    copies = _gathered if goal.local_nbytes > tensor._spec.local_nbytes else _summed
    key = value.id, goal
    with controller.lock:
        kept = value.kept.get(goal) if value.kept else None
        if kept is not None:
            copy, generation = kept
            recorder = watch.recorder()
            made_before = recorder is not None and copy.id < recorder.floor  # another call would not find it
            if generation == value.root.generation and not made_before:
                copies.used(key)
                return wrap(goal, copy)
            copies.drop(key)
        generation = value.root.generation
    # Without the lock, for it may wait. A write by another thread meanwhile leaves the copy void, as its generation is the one before.
    moved = redistribute.move(tensor, goal, why)
    moved._value.kept = COPY
    with controller.lock:
        if value.kept is None:
            value.kept = {}
        if goal not in value.kept:  # another thread may have been first
            value.kept[goal] = moved._value, generation
            copies.add(key, value, moved._value.id)
    return moved


def _base_to_move(tensor: Any, goal: Spec) -> tuple[Any, Spec] | None:
    """What ``tensor`` is a view of, and where a copy of that would have to be for its view to be one of ``tensor`` at ``goal``.

    None if it is no such view, its base has gone, or the copy is not whole along the axes along which it moves. While a call is recorded
    only views that it takes count: where this one is, another call may find another tensor.
    """
    value, spec = tensor._value, tensor._spec
    taken = value.taken
    recorder = watch.recorder()
    if recorder is not None and value.id < recorder.first:
        return None
    base = None if taken is None else taken.base()
    if base is None or base.kept is COPY or goal.mesh is not spec.mesh:
        return None
    placements = list(taken.spec.placements)
    for axis, (old, new) in enumerate(zip(spec.placements, goal.placements, strict=True)):
        if old is not new:
            if new is not REPLICATE:
                return None
            placements[axis] = REPLICATE
    return wrap(taken.spec, base), taken.spec.with_placements(placements)


def _view_of_copy(value: Value, base: tuple[Any, Spec], why: str, controller: Controller) -> Any:
    """The view ``value`` once more, of the kept copy of its base."""
    from .dispatch import call

    taken = value.taken
    whole, goal = base
    if value.keep is None:
        value.keep = whole._value  # and its copies live as long as the view does
    view = call(taken.info, (_copy(whole, goal, why, controller), *taken.args), taken.kwargs)
    view._value.kept = COPY
    return view


def forget() -> None:
    """The cluster has ended, and its values with it."""
    _summed.clear()
    _gathered.clear()


runtime.on_close.append(forget)
