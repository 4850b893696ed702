"""Attention over a split sequence on real worker processes: values, bytes in memory, failures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dtorch
from dtorch import Replicate
from dtorch.errors import RemoteError

from .compare import MESHES, SEQUENCE, compare

#: Runs on each worker: writes down, of every step of a ring, what it was and how many bytes of tensors the worker then holds.
PROBE = '''
import gc, json, torch
from dtorch.worker import registry
from dtorch.worker.comm import shared

def held(communicator):
    """Bytes of tensors in the worker's own memory, and of what it has published in its part of the shared memory."""
    storages = {}
    for t in gc.get_objects():
        if isinstance(t, torch.Tensor) and t.numel():
            storage = t.untyped_storage()
            if storage.nbytes() < 1 << 26:  # not a window on shared memory
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values()), sum(nbytes for offset, nbytes, readers in communicator._sent.waiting)

def note(communicator, what):
    with open(OUT + str(communicator._device), "a") as file:
        file.write(json.dumps([what, *held(communicator)]) + "\\n")

for name, what in (("_start", "start"), ("_finish", "finish")):
    def wrapped(self, *args, own=getattr(shared.SharedMemory, name), what=what):
        global communicator
        communicator = self
        result = own(self, *args)
        note(self, what)
        return result
    setattr(shared.SharedMemory, name, wrapped)

import dtorch.worker.functions_attention
for name in ("dtorch.attention_block", "dtorch.attention_block_backward"):
    def block(here, *args, own=registry.DEVICE_FUNCTIONS[name]):
        result = own(here, *args)
        if "communicator" in globals():
            note(communicator, "block")
        return result
    registry.DEVICE_FUNCTIONS[name] = block
'''


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Workers with the probe; where it writes."""
    folder = tmp_path_factory.mktemp("ring")
    (folder / "ring_probe.py").write_text(f"OUT = {str(folder / 'device')!r}\n{PROBE}")
    sys.path.insert(0, str(folder))
    dtorch.shutdown()
    dtorch.init(engine="processes", worker_imports=["ring_probe"])
    yield folder
    dtorch.shutdown()
    sys.path.remove(str(folder))


@pytest.mark.parametrize("mesh", ["ring of 3", "both", "ulysses"])
@pytest.mark.usefixtures("notes")
def test_as_on_one_device(mesh: str) -> None:
    where = MESHES[mesh]
    compare(*where, is_causal=True, queries=37)
    compare(*where, heads=6, kv_heads=3, queries=9, keys=23)
    compare(*where, mask=torch.randn(2, 4, 16, 16))
    compare(*where, dtype=torch.bfloat16, is_causal=True)


@pytest.mark.parametrize("axis", ["ring_cp", "ulysses_cp"])
@pytest.mark.parametrize("other", ["dp", "tp"])
@pytest.mark.usefixtures("notes")
def test_beside_data_and_tensor_parallelism(axis: str, other: str) -> None:
    mesh = dtorch.init_device_mesh("cpu", (2, 2), (other, axis))
    placement = {"dp": dtorch.Shard(0), "tp": dtorch.Shard(1)}[other]
    compare(mesh, [placement, SEQUENCE], kv_heads=2, is_causal=True, queries=19)


@pytest.mark.usefixtures("notes")
def test_a_ring_of_two_is_its_own_neighbour_twice() -> None:
    mesh = dtorch.init_device_mesh("cpu", 2, ("ring_cp",))
    for _ in range(3):
        compare(mesh, [SEQUENCE], is_causal=True, queries=64)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_worker_never_holds_more_than_two_blocks_of_others(notes: Path, is_causal: bool) -> None:
    """Counted in bytes on each of four workers at every step of forward: what there is beside what was there before."""
    n = 4
    rows, queries = (1024, n * 1024) if is_causal else (256, 512)
    mesh = dtorch.init_device_mesh("cpu", n, ("ring_cp",))
    q = dtorch.zeros(1, 1, queries, 4, device_mesh=mesh, placements=[SEQUENCE])
    k, v = (
        dtorch.rand(1, 16 if not is_causal else 1, n * rows, 4, device_mesh=mesh, placements=[SEQUENCE]) for _ in "kv"
    )
    if not is_causal:
        q = q.expand(1, 16, queries, 4).contiguous()
    share = 2 * k.nbytes // n
    before = [sum(x.nbytes for x in (q, k, v)) // n for _ in range(n)]
    dtorch.synchronize()
    for path in notes.glob("device*"):
        path.unlink()
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    dtorch.synchronize()
    # What belongs to queries: themselves in a zigzag, the output and its log-sum-exp.
    of_queries = 2 * q.nbytes // n + q.nbytes // 4 // n
    for device in range(n):
        steps = [json.loads(line) for line in (notes / f"device{device}").read_text().splitlines()]
        most = max(own + waiting for _, own, waiting in steps)
        assert most - before[device] <= 2 * share + of_queries + 4096
        # It was under way before the block was computed on, and taken in after it.
        order = [what for what, *_ in steps]
        assert order == ["start", "start", "block", "finish", "finish"] * (n - 1) + ["block"]
    assert out.shape == q.shape


def test_backward_is_a_ring_too(notes: Path) -> None:
    """Two blocks of keys and values at most, once more, and two of their gradients, which travel with them: what a worker adds and
    what comes to it or goes on."""
    n = 4
    mesh = dtorch.init_device_mesh("cpu", n, ("ring_cp",))
    q = dtorch.rand(1, 16, 16, 4, device_mesh=mesh, placements=[SEQUENCE])
    k, v = (dtorch.rand(1, 16, n * 1024, 4, device_mesh=mesh, placements=[SEQUENCE]) for _ in "kv")
    for t in (q, k, v):
        t.requires_grad_()
    share = 2 * k.nbytes // n
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    dtorch.synchronize()
    for path in notes.glob("device*"):
        path.unlink()
    before = [sum(x.nbytes for x in (q, k, v, out)) // n for _ in range(n)]
    out.backward(dtorch.ones(out.shape, device_mesh=mesh, placements=[SEQUENCE]))
    dtorch.synchronize()
    for device in range(n):
        steps = [json.loads(line) for line in (notes / f"device{device}").read_text().splitlines()]
        assert max(own + waiting for _, own, waiting in steps) - before[device] <= 4 * share + 2 * q.nbytes + 4096


@pytest.mark.usefixtures("notes")
def test_a_failure_goes_round_the_ring_and_nobody_hangs() -> None:
    mesh = dtorch.init_device_mesh("cpu", 4, ("ring_cp",))
    q = torch.randn(1, 2, 8, 4)
    x = dtorch.distribute_tensor(q, mesh, [SEQUENCE])
    table = dtorch.ones(8, 2, device_mesh=mesh, placements=[Replicate()])
    index = dtorch.distribute_tensor(torch.tensor([0, 1, 2, 3, 4, 99, 6, 7]), mesh, [dtorch.Shard(0)])
    bad = table.index_select(0, index)[None, None].expand(1, 2, 8, 2).contiguous()  # fails on one device
    bad = torch.cat([bad, bad], -1)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for _ in range(3):
        for out in (sdpa(x, bad, x), sdpa(bad, x, x, is_causal=True)):
            with pytest.raises(RemoteError, match="index out of range"):
                out.to_torch()
        torch.testing.assert_close(sdpa(x, x, x).to_torch(), sdpa(q, q, q))


@pytest.mark.usefixtures("notes")
def test_a_failure_in_the_middle_of_the_ring() -> None:
    """A device function that fails on one device only, between two hops: the others are told by what travels."""
    mesh = dtorch.init_device_mesh("cpu", 3, ("ring_cp",))
    q = torch.randn(1, 2, 9, 4)
    x = dtorch.distribute_tensor(q, mesh, [SEQUENCE]).requires_grad_()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    mask = dtorch.distribute_tensor(torch.zeros(9, 9), mesh, [dtorch.Shard(0)])
    broken = mask.index_select(1, dtorch.distribute_tensor(torch.tensor([*range(8), 77]), mesh, [dtorch.Shard(0)]))
    out = sdpa(x, x, x, attn_mask=broken)
    out.sum().backward()
    for read in (out.detach(), x.grad):
        with pytest.raises(RemoteError):
            read.to_torch()
    torch.testing.assert_close(sdpa(x, x, x).detach().to_torch(), sdpa(q, q, q))
