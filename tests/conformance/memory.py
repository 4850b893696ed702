"""What an op's results share with its arguments: found by writing to the one and looking at the other.

Where torch gives a view, or the argument itself, a later write must be seen through both; where it gives new memory, it must not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from .checks import arguments
from .samples import Sample

MODES = {"alias": torch.enable_grad, "alias_no_grad": torch.no_grad, "alias_inference": torch.inference_mode}


def sharing(function: Callable, mode: Callable, sample: Sample, place: Any) -> Any:
    """For each result which arguments it is, which elements of every argument and result a write to it changes, and the same for
    a write to each argument."""
    with mode():
        args, kwargs = arguments(sample, place, requires_grad=mode is torch.enable_grad)
        inputs = _tensors((args, kwargs))
        outputs = _tensors(function(*args, **kwargs))
        itself = [[position for position, one in enumerate(inputs) if one is out] for out in outputs]
        with torch.no_grad():
            return itself, [_changed_by(one, [*inputs, *outputs], place) for one in [*outputs, *inputs]]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _changed_by(written: torch.Tensor, looked_at: list[torch.Tensor], place: Any) -> Any:
    """The elements of ``looked_at`` that have other values once ``written`` has, or that torch refuses the write."""
    before = [place.fetch(one).clone() for one in looked_at]
    try:
        if written.dtype == torch.bool:
            written.logical_not_()
        else:
            written.fill_(57 if (place.fetch(written) != 57).any() else 58)
    except RuntimeError as error:
        return f"refused: {type(error).__name__}"
    return [_differs(old, place.fetch(one)) for old, one in zip(before, looked_at, strict=True)]


def _differs(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if old.shape != new.shape:
        return torch.ones(())
    return (old != new) & ~((old != old) & (new != new))
