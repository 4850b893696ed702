"""Memory of large tensors that died serves the next ones, and no two tensors that live share any."""

from __future__ import annotations

import torch

from dtorch import memory_pool


def test_a_dead_tensors_memory_serves_the_next_one_of_about_its_size(monkeypatch) -> None:
    monkeypatch.setattr(memory_pool, "_kept", {})
    first = memory_pool.empty((3, 1000, 1000), torch.float32)
    second = memory_pool.empty((3, 1000, 1000), torch.float32)
    assert first.shape == (3, 1000, 1000)
    assert first.is_contiguous()
    assert first.untyped_storage().nbytes() == first.nbytes
    assert first.data_ptr() != second.data_ptr()
    second.fill_(2)
    place, view = first.data_ptr(), first[1]
    del first
    assert memory_pool.empty((3, 1000, 1000), torch.float32).data_ptr() != place  # the view lives
    del view
    again = memory_pool.empty((1400, 2000), torch.int32)
    assert again.data_ptr() == place
    again.fill_(7)
    assert torch.equal(second, torch.full_like(second, 2))


def test_small_tensors_are_torchs_own_and_too_much_is_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(memory_pool, "_kept", {})
    assert memory_pool.empty((5, 0), torch.bfloat16).shape == (5, 0)
    assert memory_pool.empty((5,), torch.int8).resize_(7).shape == (7,)
    monkeypatch.setattr(memory_pool, "KEPT_BYTES", 9 << 20)
    tensors = [memory_pool.empty((4 << 20,), torch.uint8) for _ in range(4)]
    tensors.clear()
    assert sum(map(len, memory_pool._kept.values())) == 2
    memory_pool.give_back()
    assert not memory_pool._kept
