"""Which pipeline stage a layer belongs to."""

from __future__ import annotations

from . import hints


@hints.takes
def assign_layers_to_stages(num_layers: int, num_stages: int) -> list[int]:
    """The stage of each layer, in order; earlier stages take the remainder.

    Example::

        >>> assign_layers_to_stages(5, 2)
        [0, 0, 0, 1, 1]
    """
    for name, value in (("num_layers", num_layers), ("num_stages", num_stages)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"assign_layers_to_stages(): argument {name!r} must be int, not {type(value).__name__}")
    if num_stages < 1:
        raise ValueError(f"assign_layers_to_stages(): num_stages must be at least 1, got {num_stages}")
    if num_layers < num_stages:
        raise ValueError(f"assign_layers_to_stages(): {num_stages} stages need as many layers, got {num_layers}")
    size, extra = divmod(num_layers, num_stages)
    return [stage for stage in range(num_stages) for _ in range(size + (stage < extra))]
