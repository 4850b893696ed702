"""A device's values from and to the client: PUT, GET, DESCRIBE and SHARDS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .. import memory_pool
from ..engine import protocol
from ..mesh import DeviceMesh
from ..placement import REPLICATE, decode, is_partial
from ..raw import copy, dtype_called, dtype_name, to_bytes
from ..sharding.layout import Box, box_shape, local_box
from .assemble import cut
from .poison import Poison

Value = torch.Tensor | Poison


class Blobs(Protocol):
    """The client's bytes, as this device reaches them."""

    def fill(self, target: torch.Tensor, blob: Any, dtype: torch.dtype, shape: Sequence[int], box: Box) -> None:
        """Copy ``box`` of the tensor of ``shape`` that is a PUT command's ``blob`` to ``target``."""

    def landing(self, landing: Any) -> torch.Tensor:
        """The space of a GET command's ``landing`` (never None): 1-d, uint8, writable, the whole tensor."""


class ValuesInOut:
    """Takes in and gives out what ``values``, the device's store, holds."""

    def __init__(
        self,
        device: int,
        values: dict[int, Value],
        meshes: dict[int, DeviceMesh],
        emit: Callable[[list], None],
        blobs: Blobs,
    ) -> None:
        self._device = device
        self._values = values
        self._meshes = meshes
        self._emit = emit
        self._blobs = blobs

    def put(self, command: list) -> None:
        _, value, mesh_id, codes, shape, dtype_name, blob = command
        mesh = self._meshes[mesh_id]
        coordinate = mesh.coordinate(self._device)
        if coordinate is None:
            return
        placements, dtype = decode(codes), dtype_called(dtype_name)
        box = local_box(placements, mesh.shape, coordinate, shape)
        device = torch_device(mesh.device_type, self._device)
        if device.type == "cpu":
            result = memory_pool.empty(box_shape(box), dtype)
        else:
            result = torch.empty(box_shape(box), dtype=dtype, device=device)
        if any(is_partial(placement) and index for placement, index in zip(placements, coordinate, strict=True)):
            result.zero_()
        elif result.numel():
            self._blobs.fill(result, blob, dtype, shape, box)
        self._values[value] = result

    def get(self, command: list) -> None:
        _, token, value, mesh_id, codes, shape, dtype, landing = command
        mesh = self._meshes[mesh_id]
        coordinate = mesh.coordinate(self._device)
        placements = decode(codes)
        if coordinate is None or any(
            placement is REPLICATE and index for placement, index in zip(placements, coordinate, strict=True)
        ):
            return
        tensor = self._values[value]
        if isinstance(tensor, Poison):
            self.reply_poison(token, tensor)
            return
        box = local_box(placements, mesh.shape, coordinate, shape)
        if tensor.dtype != dtype_called(dtype) or tuple(tensor.shape) != box_shape(box):
            raise TypeError(
                f"planned as a {dtype} tensor of shape {box_shape(box)}, but the op made a {dtype_name(tensor.dtype)} "
                f"tensor of shape {tuple(tensor.shape)}; please report this"
            )
        if landing is None:
            self.reply(token, to_bytes(tensor))
        else:
            if tensor.numel():
                copy(cut(self._blobs.landing(landing).view(tensor.dtype).view(shape), box), tensor)
            self.reply(token, None)

    def describe(self, command: list) -> None:
        _, token, mesh_id, *values = command
        if self._meshes[mesh_id].device_ids[0] != self._device:
            return
        found = []
        for value in values:
            tensor = self._values[value]
            if isinstance(tensor, Poison):
                self.reply_poison(token, tensor)
                return
            found.append([list(tensor.shape), list(tensor.stride()), dtype_name(tensor.dtype)])
        self.reply(token, found)

    def shards(self, command: list) -> None:
        _, token, value, mesh_id = command
        if self._meshes[mesh_id].coordinate(self._device) is None:
            return
        tensor = self._values[value]
        if isinstance(tensor, Poison):
            self.reply_poison(token, tensor)
        else:
            self.reply(token, [list(tensor.shape), dtype_name(tensor.dtype), to_bytes(tensor)])

    def reply(self, token: int, payload: Any) -> None:
        self._emit([protocol.REPLY, self._device, token, payload])

    def reply_poison(self, token: int, poison: Poison) -> None:
        self._emit([protocol.POISONED, self._device, token, poison.origin])


def torch_device(device_type: str, device: int) -> torch.device:
    """Where the tensors of device ``device`` of a mesh live."""
    return torch.device("cpu") if device_type == "cpu" else torch.device(device_type, device)
