"""Transfers over gloo, where there is no room for arenas, give what plain torch gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from dtorch.placement import PARTIAL, PlacementList, shard
from dtorch.placement import REPLICATE as R
from dtorch.sharding.rearrange import Shift
from dtorch.sharding.transfer import Half, steps
from dtorch.worker.comm.shared import SharedMemory
from dtorch.worker.comm.sockets import Sockets
from dtorch.worker.poison import Poison

from .test_comm import LINE, PAIR, check_every_case, run_forked, whole


def test_every_transfer(tmp_path: Path) -> None:
    def work(device: int, shared: SharedMemory) -> None:
        communicator = Sockets(shared._fd, shared._control, device, str(tmp_path))
        check_every_case(device, lambda step, value: communicator.carry(step, value, 0))
        assert communicator._arena._end == 0

    run_forked([0, 1, 2, 3], work)


def test_halves_hops_and_poison(tmp_path: Path) -> None:
    def work(device: int, shared: SharedMemory) -> None:
        communicator = Sockets(shared._fd, shared._control, device, str(tmp_path))
        ring = [
            Shift(device, (device - 1) % 3, (device + 1) % 3, torch.bfloat16, "cpu", starts=starts)
            for starts in (True, False)
        ]
        for size in (0, 7, 100_000):
            held = [whole((size, 2), torch.bfloat16, seed) for seed in range(3)]
            for _ in range(2):
                communicator.carry(ring[0], held[device], 1)
            for _ in range(2):
                assert torch.equal(communicator.carry(ring[1], None, 1), held[(device - 1) % 3])  # type: ignore[arg-type]
        poison = Poison((1, 9))
        communicator.carry(ring[0], poison if device == 1 else held[device], 1)
        found = communicator.carry(ring[1], None, 1)
        assert found == poison if device == 2 else isinstance(found, torch.Tensor)
        (step,) = steps(LINE, PlacementList([PARTIAL]), LINE, PlacementList([R]), (8,), torch.float32, device)
        for value, expected in (
            (torch.ones(8), torch.full((8,), 3.0)),
            (poison if device == 1 else torch.ones(8), poison),
        ):
            assert communicator.carry(Half(step, True), value, 1) is None
            result = communicator.carry(Half(step, False), value, 1)
            assert torch.equal(result, expected) if isinstance(expected, torch.Tensor) else result == expected  # type: ignore[arg-type]
        if device < 2:
            hop = Shift(device, 1 - device, 1 - device, torch.float32, "cpu", starts=True)
            communicator.carry(hop, torch.full((3,), float(device)), 1)
            found = communicator.carry(dataclasses.replace(hop, starts=False), None, 1)
            assert torch.equal(found, torch.full((3,), 1.0 - device))  # type: ignore[arg-type]
            (step,) = steps(PAIR, PlacementList([shard(0)]), PAIR, PlacementList([R]), (6,), torch.float32, device)
            assert communicator.carry(step, poison if device else torch.ones(3), 1) == poison

    run_forked([0, 1, 2], work)
