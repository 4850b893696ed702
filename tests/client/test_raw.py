"""Tensors as bytes: in row-major order, whatever the tensor is a view of."""

from __future__ import annotations

import pytest
import torch

from dtorch.raw import from_bytes, to_bytes

BASE = torch.arange(12.0).reshape(3, 4)
TENSORS = {
    "transposed": BASE.t(),
    "sliced": BASE[:, ::2],
    "expanded": torch.tensor([[1], [2]]).expand(2, 3),
    "0-d": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "bfloat16": BASE.bfloat16(),
    "conjugate": torch.complex(BASE, BASE).conj(),
    "negative": torch.complex(BASE, BASE).conj().imag,
    "requires gradients": torch.nn.Parameter(BASE),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_are_the_tensor(name: str) -> None:
    tensor = TENSORS[name]
    found = from_bytes(to_bytes(tensor), tensor.dtype, tensor.shape)
    assert found.is_contiguous()
    assert torch.equal(found, tensor.detach())
