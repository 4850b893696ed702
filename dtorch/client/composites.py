"""Composite ops whose C++ does not work on a tensor without memory: our form of them, for torch's dispatcher.

torch runs a composite op's own C++ on our handles and only its parts reach dispatch. Two kinds of C++ go wrong there: code that
reads a tensor's memory, and code that has a branch of its own for subclasses which forgets ``out=``. Others are kept whole because their
parts would bring together what is never to be in one place: attention over a split sequence, and products of tensors that are split
along dims which torch makes one. Plain tensors keep torch's kernel.
"""

from __future__ import annotations

from typing import Any

import torch

from ..tensor import Tensor
from . import attention, destinations, dispatch, norms, products, torch_internals

aten = torch.ops.aten


def tensor_split(x: torch.Tensor, indices_or_sections: torch.Tensor, dim: int = 0) -> list[torch.Tensor]:
    """``tensor_split`` by a tensor: its C++ reads the tensor's memory. Waits for the values."""
    values = indices_or_sections.tolist()
    if isinstance(values, int):
        return list(aten.tensor_split.sections(x, values, dim))
    return list(aten.tensor_split.indices(x, values, dim))


def _out_ignored(op: Any) -> Any:
    """``op`` with ``out=`` written: torch 2.13's C++ returns a fresh tensor instead, for subclasses."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("out")) is Tensor:
            return destinations.run(dispatch.info_of(op), args, kwargs)
        with torch_internals.below_autograd():
            return op(*args, **kwargs)

    return call


OUT_IGNORED = (
    aten.linalg_matrix_rank.out,
    aten.linalg_matrix_rank.out_tol_tensor,
    aten.linalg_matrix_rank.atol_rtol_tensor_out,
    aten.linalg_matrix_rank.atol_rtol_float_out,
)

#: Torch has kernels for these, and a formula that it would take for our handles: eight ops of the client's and the workers' for one, and
#: other bits (`docs/performance.md`).
WITH_KERNELS = (aten.silu_backward.default, aten.mish_backward.default)


def register() -> None:
    """Put these in place of torch's own, for our handles."""
    for op in WITH_KERNELS:
        torch_internals.keep_whole(op)
    torch_internals.override(aten.tensor_split.tensor_indices_or_sections, tensor_split)
    torch_internals.override(attention.OP, attention.scaled_dot_product_attention)
    torch_internals.override(norms.RMS_NORM, norms.rms_norm)
    for op, whole in products.WHOLE.items():
        torch_internals.override(op, whole)
    for op in OUT_IGNORED:
        torch_internals.override(op, _out_ignored(op), with_memory=True)
