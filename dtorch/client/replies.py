"""What the workers' replies are put together to: a future's value."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.interface import Engine
from ..future import TensorFuture
from ..raw import from_bytes
from ..sharding.layout import box_shape, local_box
from ..sharding.spec import Spec


class Waiting:
    """Replies that a future waits for."""

    __slots__ = ("future", "missing")

    def __init__(self, future: TensorFuture, expected: int) -> None:
        self.future = future
        self.missing = expected

    def arrived(self, device: int, payload: Any) -> bool:
        """Take one reply; True with the last."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        self.future._set(error=error)


class Collect(Waiting):
    """Replies by device."""

    __slots__ = ("replies",)

    def __init__(self, future: TensorFuture, expected: int) -> None:
        super().__init__(future, expected)
        self.replies: dict[int, Any] = {}

    def arrived(self, device: int, payload: Any) -> bool:
        self.replies[device] = payload
        self.missing -= 1
        if not self.missing:
            self.future._set(self.replies)
        return not self.missing


class Gather(Waiting):
    """A whole tensor out of the boxes that devices send, or copy into a landing."""

    __slots__ = ("engine", "landing", "spec", "whole")

    def __init__(self, future: TensorFuture, spec: Spec, expected: int, landing: Any, engine: Engine) -> None:
        super().__init__(future, expected)
        self.spec = spec
        self.landing = landing
        self.engine = engine
        self.whole: torch.Tensor | None = None

    def arrived(self, device: int, payload: Any) -> bool:
        spec = self.spec
        if self.landing is None:
            mesh = spec.mesh
            box = local_box(spec.placements, mesh.shape, mesh.coordinate(device), spec.shape)
            part = from_bytes(payload, spec.dtype, box_shape(box))
            if box_shape(box) == tuple(spec.shape):
                self.whole = part
            else:
                if self.whole is None:
                    self.whole = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
                self.whole[tuple(slice(*edge) for edge in box)] = part
        self.missing -= 1
        if self.missing:
            return False
        if self.landing is not None:
            self.whole = self.engine.landed(self.landing, spec.shape, spec.dtype)
        self.future._set(self.whole)
        return True

    def fail(self, error: Exception) -> None:
        if self.landing is not None:
            self.engine.release(self.landing)
        super().fail(error)
