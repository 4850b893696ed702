"""What the source of a lowered program names: makers, each of which makes one such thing for one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..mesh import DeviceMesh
from ..placement import decode
from ..program.ir import (
    Const,
    Local,
    LocalShape,
    Program,
    Rearrange,
    Reshard,
    ReshardDone,
    ReshardStart,
    ShiftDone,
    ShiftStart,
)
from ..raw import dtype_called
from ..sharding.layout import local_shape
from ..sharding.rearrange import Shift, rearrange, shift
from ..sharding.sequence import Sizes
from ..sharding.transfer import Half, Transfer, steps
from . import (  # noqa: F401  these register the device functions
    functions,
    functions_attention,
    functions_attention_backward,
    functions_files,
    functions_sharded,
    random,
)
from .assemble import assemble
from .poison import Poison
from .products import Empty, computed_into
from .registry import DEVICE_FUNCTIONS, Here


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """Where a program is bound: a device, where its tensors live, and the meshes by id.

    ``empty``: makes memory for what is to be moved; None if that is like any other.
    """

    device: int
    torch_device: torch.device
    meshes: Mapping[int, DeviceMesh]
    empty: Empty | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Maker:
    """``make(site)`` makes the thing; ``everywhere``: the same one for every device."""

    make: Callable[[Site], Any]
    everywhere: bool = False


class PoisonedInput(Exception):
    """A device function was about to get a `Poison`."""


def same(value: Any) -> Maker:
    """``value`` itself."""
    return Maker(lambda site: value, everywhere=True)


def constant(const: Const) -> Maker:
    if const.kind == "device":
        return Maker(lambda site: site.torch_device)
    if const.kind in _NUMBERS:
        return same(_NUMBERS[const.kind](const.value))
    value = getattr(torch, const.value, None)
    if const.kind not in _TORCH_KINDS or not isinstance(value, _TORCH_KINDS[const.kind]):
        raise ValueError(f"unknown constant {const!r}")
    return same(value)


_NUMBERS: dict[str, Callable[[str], Any]] = {"int": int, "complex": complex}
_TORCH_KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def device_function_called(name: str) -> Maker:
    found = DEVICE_FUNCTIONS.get(name)
    if found is None:
        raise ValueError(f"there is no device function {name!r}")
    return same(found)


def product_of(name: str, plain: Callable[..., torch.Tensor]) -> Maker:
    """The product ``name``, whose result is to be moved; as a rule it is ``plain``."""

    def make(site: Site) -> Callable[..., torch.Tensor]:
        if site.empty is None or site.torch_device.type != "cpu":
            return plain
        return computed_into(name, plain, site.empty)

    return Maker(make)


def local_shape_of(program: Program, arg: LocalShape) -> Maker:
    """``f(global shape)``: the part that the device holds."""
    placements = decode(arg.placements)

    def make(site: Site) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        mesh = site.meshes[program.mesh]
        coordinate = mesh.coordinate(site.device)
        assert coordinate is not None
        return functools.lru_cache(maxsize=64)(lambda shape: local_shape(placements, mesh.shape, coordinate, shape))

    return Maker(make)


def here_of(program: Program, call: Local, position: Callable[[Any], int]) -> Maker:
    """``f(command, tensor arguments)``: the `Here` of this run. A function may never look at an argument, so it checks them."""
    inputs, outputs = (
        [(decode(layout.placements), position(layout.shape), program.constant(layout.shape)) for layout in layouts]
        for layouts in (call.inputs, call.outputs)
    )

    def make(site: Site) -> Callable[[list, tuple], Here]:
        mesh = site.meshes[program.mesh]
        coordinate = mesh.coordinate(site.device)
        assert coordinate is not None

        def here(command: list, tensors: tuple) -> Here:
            for tensor in tensors:
                if type(tensor) is Poison:
                    raise PoisonedInput
            return Here(
                mesh,
                coordinate,
                site.torch_device,
                [(placements, tuple(command[at] if fixed is None else fixed)) for placements, at, fixed in inputs],
                [(placements, tuple(command[at] if fixed is None else fixed)) for placements, at, fixed in outputs],
            )

        return here

    return Maker(make)


def planner_of(move: Reshard | ReshardStart | Rearrange) -> Maker:
    """``f(global shape)``: the transfers of what moves, or of half of it, in which the device takes part."""
    if isinstance(move, ReshardStart):
        return _halver_of(move)
    if isinstance(move, Rearrange):
        return _rearranger_of(move)
    source, target, dtype = decode(move.source_placements), decode(move.target_placements), dtype_called(move.dtype)

    def make(site: Site) -> Callable[[tuple[int, ...]], tuple[Transfer, ...]]:
        source_mesh, target_mesh = site.meshes[move.source_mesh], site.meshes[move.target_mesh]
        return functools.lru_cache(maxsize=64)(
            lambda shape: steps(source_mesh, source, target_mesh, target, shape, dtype, site.device)
        )

    return Maker(make)


def _halver_of(half: ReshardStart) -> Maker:
    """Only the first of the transfers begins early; the others stand on its result."""
    whole, starts = planner_of(half.move), not isinstance(half, ReshardDone)

    def make(site: Site) -> Callable[[tuple[int, ...]], tuple[Transfer | Half, ...]]:
        plan = whole.make(site)

        def halves(shape: tuple[int, ...]) -> tuple[Transfer | Half, ...]:
            first, *others = plan(shape)
            halved = len(first.group) > 1
            if starts:
                return (Half(first, True),) if halved else ()
            return (Half(first, False) if halved else first, *others)

        return functools.lru_cache(maxsize=64)(halves)

    return Maker(make)


def _rearranger_of(move: Rearrange) -> Maker:
    placements, dtype = decode(move.placements), dtype_called(move.dtype)
    count = len(Sizes._fields)

    def make(site: Site) -> Callable[[tuple[int, ...]], tuple[Transfer, ...]]:
        mesh = site.meshes[move.mesh]

        def plan(shape: tuple[int, ...]) -> tuple[Transfer, ...]:
            sizes, own = Sizes(*shape[:count]), shape[count:]
            everyone = rearrange(mesh, move.kind, move.back, placements, move.roles, move.is_causal, sizes, own, dtype)
            return (everyone[site.device],)

        return plan

    return Maker(make)


def shift_of(hop: ShiftStart | ShiftDone) -> Maker:
    """The device's part of the hop."""
    dtype, starts = dtype_called(hop.dtype), isinstance(hop, ShiftStart)

    def make(site: Site) -> Shift:
        return shift(site.meshes[hop.mesh], tuple(hop.axes), dtype, site.device, starts)

    return Maker(make)


def _alone(site: Site) -> Callable[[Transfer, Any], Any]:
    def alone(transfer: Transfer, tensor: torch.Tensor | Poison | None) -> torch.Tensor | Poison | None:
        if transfer.shape is None or type(tensor) is Poison:
            return None if transfer.shape is None else tensor
        return assemble(transfer, lambda device: tensor, site.torch_device)  # type: ignore[arg-type,return-value]

    return alone


#: ``f(transfer, local tensor)``: the result of a transfer that needs no other device.
ALONE = Maker(_alone)


def tensors(result: Any) -> tuple | list:
    """A device function's result as a sequence."""
    return result if isinstance(result, (tuple, list)) else (result,)


def flatten(result: Any) -> list:
    """The tensors (or None for absent ones) of an op's result that mixes lists, numbers and tensors."""
    found: list = []
    for item in tensors(result):
        if isinstance(item, (tuple, list)):
            found.extend(flatten(item))
        elif item is None or isinstance(item, torch.Tensor):
            found.append(item)
    return found
