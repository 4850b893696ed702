"""What is being compared with plain torch: dtorch, or a stand-in that tests the harness."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any, Protocol

import torch

from .placements import Codes


class Adapter(Protocol):
    """Turns plain tensors into the tested ones and back."""

    #: Random ops give plain torch's own bits after the same seed.
    same_random: bool

    def distribute(self, tensor: torch.Tensor, mesh_shape: tuple[int, ...], codes: Codes) -> torch.Tensor:
        """``tensor``'s value, laid out as ``codes`` say."""

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        """The value as a plain tensor; raises if its shape or dtype is not what the handle says."""

    def factory(self, function: Callable, mesh_shape: tuple[int, ...], codes: Codes) -> Callable:
        """``function``, which takes no tensors, made to give its result in the layout ``codes``."""

    def layout(self, value: torch.Tensor) -> object:
        """Something that compares equal as long as the placements stay what they were."""

    def recover(self) -> None:
        """Forget a failure: whatever it left pending must not be blamed on the next check."""


class PlainAdapter:
    """Plain torch on both sides: every check must be ok."""

    same_random = True

    def distribute(self, tensor: torch.Tensor, mesh_shape: tuple[int, ...], codes: Codes) -> torch.Tensor:
        return tensor.clone()

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def factory(self, function: Callable, mesh_shape: tuple[int, ...], codes: Codes) -> Callable:
        return function

    def layout(self, value: torch.Tensor) -> object:
        return None

    def recover(self) -> None:
        pass


class FaultyAdapter(PlainAdapter):
    """Loses the last element of whatever it brings back: every check that compares values must be wrong."""

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        if value.layout != torch.strided or value.numel() == 0:
            return value
        broken = value.detach().clone(memory_format=torch.contiguous_format)
        last = broken.view(-1)[-1:]
        last.copy_(~last if last.dtype == torch.bool else torch.nan_to_num(last.to(_wide(last.dtype))) * 2 + 1)
        return broken


class DeadlyAdapter(PlainAdapter):
    """Ends its process at the cosine of anything, as a crash in a kernel would."""

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        if value.grad_fn is None and torch.equal(value, self.last.cos()):
            os.kill(os.getpid(), signal.SIGKILL)
        return value

    def distribute(self, tensor: torch.Tensor, mesh_shape: tuple[int, ...], codes: Codes) -> torch.Tensor:
        self.last = tensor.clone()
        return self.last


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


class DtorchAdapter:
    """dtorch, in simulation or on real workers."""

    def __init__(self, engine: str, random: str = "torch") -> None:
        import dtorch

        self.dtorch: Any = dtorch
        self.engine = engine
        self.random = random
        self.same_random = random == "torch"
        self.start()

    def start(self) -> None:
        self.dtorch.init(engine=self.engine, random=self.random)

    def distribute(self, tensor: torch.Tensor, mesh_shape: tuple[int, ...], codes: Codes) -> torch.Tensor:
        mesh, placements = self._place(mesh_shape, codes)
        if "p" in codes:
            spread = self._spread(tensor, mesh, placements, codes)
            if spread is not None:
                return spread
        return self.dtorch.distribute_tensor(tensor, mesh, placements)

    def factory(self, function: Callable, mesh_shape: tuple[int, ...], codes: Codes) -> Callable:
        mesh, placements = self._place(mesh_shape, codes)
        ours = getattr(self.dtorch, function.__name__)

        def call(*args: Any, device: object = None, **kwargs: Any) -> Any:
            return ours(*args, **kwargs, device_mesh=mesh, placements=placements)

        return call

    def _place(self, mesh_shape: tuple[int, ...], codes: Codes) -> tuple[Any, list]:
        mesh = self.dtorch.init_device_mesh("cpu", mesh_shape)
        return mesh, [self._placement(code) for code in codes]

    def _placement(self, code: int | str) -> object:
        if isinstance(code, int):
            return self.dtorch.Shard(code)
        return self.dtorch.Partial() if code == "p" else self.dtorch.Replicate()

    def _spread(self, tensor: torch.Tensor, mesh: Any, placements: list, codes: Codes) -> torch.Tensor | None:
        """``tensor`` as a pending sum whose addends all differ from it (2t, -2t, …, t): a mere ``distribute_tensor`` leaves
        it whole on one device, which would hide many a wrong rule. None where the sum would not be exact, or is not kept.
        """
        axis = codes.index("p")
        count = mesh.shape[axis]
        if count == 1 or tensor.numel() == 0 or tensor.dtype == torch.complex32:  # for which torch has no sum
            return None
        factors = [2.0, -1.0] if count % 2 == 0 else [2.0, -2.0, 1.0]
        factors = [0.0] * (count - len(factors)) + factors
        addends = torch.stack([tensor * factor for factor in factors])
        if not torch.equal(addends.sum(0), tensor):
            return None
        stacked = [
            self.dtorch.Shard(0) if code == "p" else self.dtorch.Shard(code + 1) if isinstance(code, int) else placement
            for code, placement in zip(codes, placements, strict=True)
        ]
        with torch.no_grad():
            summed = self.dtorch.distribute_tensor(addends, mesh, stacked).sum(0)
        return summed if list(summed.placements) == placements else None

    def fetch(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, self.dtorch.Tensor):
            return value
        plain = value.detach().to_torch()
        if plain.shape != value.shape or plain.dtype != value.dtype:
            raise AssertionError(
                f"the handle says {tuple(value.shape)} {value.dtype}, the value is {tuple(plain.shape)} {plain.dtype}"
            )
        return plain

    def layout(self, value: torch.Tensor) -> object:
        return list(value.placements) if isinstance(value, self.dtorch.Tensor) else None

    def recover(self) -> None:
        try:
            self.dtorch.synchronize()
        except self.dtorch.errors.WorkerLost:
            with contextlib.suppress(Exception):
                self.dtorch.shutdown()
            self.start()
        except Exception:
            pass  # the error that has just been recorded


def make(engine: str, random: str = "torch") -> Adapter:
    """The adapter called ``engine``: a stand-in, or an engine of dtorch."""
    stand_ins = {"plain": PlainAdapter, "faulty": FaultyAdapter, "deadly": DeadlyAdapter}
    return stand_ins[engine]() if engine in stand_ins else DtorchAdapter(engine, random)
