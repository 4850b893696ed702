"""Whether a recorded call has left a tensor where no later call would put its like."""

from __future__ import annotations

import gc
import types
from typing import Any

from ..client import runtime, watch
from ..tensor import Tensor
from .recorder import Recorder


def is_hidden(made: set[int], known: list[Any], recorder: Recorder) -> bool:
    """Whether a value of ``made`` lives on, but for what the handles ``known`` keep."""
    seen: set[int] = set()
    for value in [handle._value for handle in known]:
        while value is not None:
            seen |= {value.id, *[copy.id for copy, _ in (value.kept or {}).values()]}
            value = value.keep

    def alive() -> set[int]:
        controller = runtime.controller()
        with controller.lock:
            watch.recorders[-1] = recorder
            try:
                controller.drain()
            finally:
                del watch.recorders[-1]
        return made - recorder.freed - seen

    if not alive():
        return False
    gc.collect()
    left = alive()
    if not left:
        return False
    handles = [
        one for one in gc.get_objects() if type(one) is Tensor and one._value is not None and one._value.id in left
    ]
    # What only torch itself holds, as the base of a view, no Python code can come by.
    return any(
        not isinstance(holder, types.FrameType) and holder is not handles
        for handle in handles
        for holder in gc.get_referrers(handle)
    )
