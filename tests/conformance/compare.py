"""Whether what dtorch gave is what plain torch gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.utils._pytree import tree_flatten

from .rounding import HALVES

Tolerance = tuple[float, float]
"""(relative, absolute); a tenth of the absolute part grows with the largest expected magnitude, for what cancels in a sum."""

TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: (1e-7, 1e-7),
    torch.complex128: (1e-7, 1e-7),
    torch.float32: (1e-4, 2e-5),
    torch.complex64: (1e-4, 2e-5),
    torch.bfloat16: (3e-2, 2e-2),
    torch.float16: (5e-3, 5e-3),
    torch.complex32: (5e-3, 5e-3),
}
COARSE: Tolerance = (1e-1, 1e-1)
"""For the eight-bit floats."""


def difference(
    expected: object,
    got: object,
    *,
    exact: bool,
    values: bool = True,
    floor: Tolerance = (0.0, 0.0),
    path: str = "result",
) -> tuple[str, str] | None:
    """None if ``got`` is as it should be, else (``"inexact"`` or ``"wrong"``, why).

    Args:
        exact: nothing was split, so that equal bits are expected; a close value is then ``inexact``.
        values: compare values too, not only shapes and dtypes.
        floor: tolerances that the op's own database entry asks for.
    """
    if isinstance(expected, torch.Tensor):
        return _tensors(expected, got, exact, values, floor, path)
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping) or expected.keys() != got.keys():
            return "wrong", f"{path}: expected keys {list(expected)}, got {got!r:.80}"
        pairs = [(f"{path}[{key!r}]", expected[key], got[key]) for key in expected]
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        if not isinstance(got, Sequence) or len(expected) != len(got):
            return "wrong", f"{path}: expected {type(expected).__name__} of {len(expected)}, got {got!r:.80}"
        pairs = [(f"{path}[{index}]", *pair) for index, pair in enumerate(zip(expected, got, strict=True))]
    else:
        return _plain(expected, got, values, path)
    worst = None
    for where, one, other in pairs:
        found = difference(one, other, exact=exact, values=values, floor=floor, path=where)
        if found and found[0] == "wrong":
            return found
        worst = worst or found
    return worst


def _plain(expected: object, got: object, values: bool, path: str) -> tuple[str, str] | None:
    if type(expected) is not type(got):
        return "wrong", f"{path}: expected {expected!r:.80}, got {got!r:.80}"
    if not values or expected == got:
        return None
    if isinstance(expected, float) and (
        math.isclose(expected, got, rel_tol=1e-4) or (expected != expected and got != got)
    ):
        return None
    return "wrong", f"{path}: expected {expected!r:.80}, got {got!r:.80}"


def _tensors(
    expected: torch.Tensor, got: object, exact: bool, values: bool, floor: Tolerance, path: str
) -> tuple[str, str] | None:
    if not isinstance(got, torch.Tensor):
        return "wrong", f"{path}: expected a tensor, got {got!r:.80}"
    if expected.dtype != got.dtype:
        return "wrong", f"{path}: expected {expected.dtype}, got {got.dtype}"
    if expected.shape != got.shape:
        return "wrong", f"{path}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}"
    if not values or expected.numel() == 0:
        return None
    expected, got = expected.detach().resolve_conj().resolve_neg(), got.detach().resolve_conj().resolve_neg()
    if not (expected.is_floating_point() or expected.is_complex()):
        if torch.equal(expected, got):
            return None
        return "wrong", f"{path}: {int((expected != got).sum())} of {expected.numel()} elements differ"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), got.to(wide)
    if torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) and torch.equal(a.isnan(), b.isnan()):
        return None
    relative, absolute = (max(pair) for pair in zip(TOLERANCES.get(expected.dtype, COARSE), floor, strict=True))
    finite = a[a.isfinite()].abs()
    scale = max(1.0, finite.max().item()) if finite.numel() else 1.0
    if torch.allclose(b, a, rtol=relative, atol=absolute * max(1.0, scale / 10), equal_nan=True):
        return ("inexact", f"{path}: close, not equal") if exact else None
    gap = (a - b).abs()
    known = gap[gap.isfinite()]
    return (
        "wrong",
        f"{path}: differs by up to {known.max().item() if known.numel() else math.nan:.3g} (values up to {scale:.3g})",
    )


def stride_difference(expected: object, got: object) -> str | None:
    """None if every tensor in ``got`` has the strides of the one in ``expected``, else which has not.

    The strides of dims of one element, and of tensors without any, mean nothing.
    """
    pairs = zip(tree_flatten(expected)[0], tree_flatten(got)[0], strict=False)
    for index, (one, other) in enumerate(pairs):
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _steps(one) != _steps(other):
            return f"strides of tensor {index}, {tuple(one.shape)}: expected {one.stride()}, got {other.stride()}"
    return None


def _steps(tensor: torch.Tensor) -> tuple:
    if tensor.numel() == 0:
        return ()
    return tuple(
        (dim, step) for dim, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if size > 1
    )


def no_worse(truth: object, expected: object, got: object, allowances: Sequence[torch.Tensor | None] = ()) -> bool:
    """Whether ``got`` errs from ``truth`` by no more than three times what ``expected`` does, tensor by tensor.

    Args:
        allowances: for each leaf, what `rounding.allowance` adds to that in half precision.
    """
    leaves = [tree_flatten(tree)[0] for tree in (truth, expected, got)]
    if len({len(one) for one in leaves}) != 1:
        return False
    return all(_no_worse(*each) for each in zip(*leaves, allowances or [None] * len(leaves[0]), strict=True))


def _no_worse(truth: object, expected: object, got: object, allowance: torch.Tensor | None) -> bool:
    if not all(isinstance(one, torch.Tensor) for one in (truth, expected, got)):
        return difference(expected, got, exact=True) is None
    if not (truth.shape == expected.shape == got.shape and expected.dtype == got.dtype):
        return False
    if not (expected.is_floating_point() and truth.is_floating_point()):
        return difference(expected, got, exact=True) is None
    errors = [(one.detach().double() - truth.detach().double()).abs() for one in (expected, got)]
    if not all(error.isfinite().all() for error in errors):
        return difference(expected, got, exact=False) is None
    step = truth.detach().abs().double()
    if allowance is not None and expected.dtype in HALVES:
        step += allowance
    allowed = 3 * errors[0].max() + torch.finfo(expected.dtype).eps * step if errors[0].numel() else 0
    return bool((errors[1] <= allowed).all())
