"""Random values that depend on a key and an element's place in the whole tensor alone (docs/architecture.md, law 7).

Element ``i`` of the whole tensor, counted row by row, takes words ``i * n … i * n + n - 1`` of the Philox stream of the key
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so any box can be made anywhere. Words become values
through numpy: torch's vectorised loops end in scalar code whose logarithm may differ in the last bit, so a value would
depend on where its part ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..sharding.layout import Box
from .operators import resolve
from .registry import Here, device_function

#: What moving to another place in the stream costs, in words: 6 us against 5 ns a word (numpy 2.4, one core).
_START_COST = 1200
#: Words generated at once, at most, unless one run is longer.
_MOST_WORDS = 1 << 20

#: Bits of precision: a uniform value is a multiple of 2**-digits, as in torch, so that rounding never makes it 1.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def words(key: int, shape: Sequence[int], box: Box, each: int = 1) -> np.ndarray:
    """The words of the elements in ``box`` of a tensor of ``shape``: uint64, of the box's shape, then ``each``."""
    lengths = [stop - start for start, stop in box] + [each]
    out = np.empty(lengths, dtype=np.uint64)
    if out.size:
        strides = [each * math.prod(shape[dim + 1 :]) for dim in range(len(shape))] + [1]
        first = sum(start * stride for (start, _), stride in zip(box, strides[:-1], strict=True))
        _fill(out, _Stream(key), first, strides)
    return out


def _fill(out: np.ndarray, stream: _Stream, first: int, strides: list[int]) -> None:
    """Fill ``out``, whose element at ``index`` is word ``first + index · strides``: from one covering run, or row by row."""
    span = sum((length - 1) * stride for length, stride in zip(out.shape, strides, strict=True)) + 1
    if out.ndim == 1 or (span <= _MOST_WORDS and span <= _cost(out.shape, strides)):
        run = stream.run(first, span)
        out[...] = np.lib.stride_tricks.as_strided(run, out.shape, [8 * stride for stride in strides])
    elif span == out.size:  # nothing is left out: it only is long
        flat, start = out.reshape(-1), 0
        for start in range(0, flat.size, _MOST_WORDS):
            part = flat[start : start + _MOST_WORDS]
            part[...] = stream.run(first + start, part.size)
    else:
        # As many rows at once as one run may cover, if that is no dearer than a run each.
        row_span = sum((n - 1) * s for n, s in zip(out.shape[1:], strides[1:], strict=True)) + 1
        together = max(1, _MOST_WORDS // strides[0]) if strides[0] <= row_span + _START_COST else 1
        for row in range(0, len(out), together):
            if together == 1:
                _fill(out[row], stream, first + row * strides[0], strides[1:])
            else:
                part = out[row : row + together]
                cover = stream.run(first + row * strides[0], (len(part) - 1) * strides[0] + row_span)
                part[...] = np.lib.stride_tricks.as_strided(cover, part.shape, [8 * stride for stride in strides])


def _cost(lengths: Sequence[int], strides: Sequence[int]) -> int:
    """The least number of words' time to fill rows one by one."""
    inner = sum((n - 1) * s for n, s in zip(lengths[1:], strides[1:], strict=True)) + 1
    if len(lengths) > 2:
        inner = min(inner, _cost(lengths[1:], strides[1:]))
    return lengths[0] * (inner + _START_COST)


class _Stream:
    """The Philox stream of a key."""

    def __init__(self, key: int) -> None:
        self._generator = np.random.Philox(key=key)
        self._state: Any = self._generator.state

    def run(self, first: int, count: int) -> np.ndarray:
        """Words ``first … first + count - 1``. Four words come of each count of the generator."""
        block, skip = divmod(first, 4)
        self._state["state"]["counter"][0] = block
        self._generator.state = self._state
        return self._generator.random_raw(skip + count)[skip:]


# From words to numbers. All take and give contiguous arrays: numpy's loops over others may round differently.


def _uniform(raw: np.ndarray, digits: int) -> np.ndarray:
    """Multiples of ``2**-digits`` in [0, 1), exact: float32 up to 24 digits, else float64."""
    kind = np.float32 if digits <= 24 else np.float64
    return (raw >> np.uint64(64 - digits)).astype(kind) * kind(2.0**-digits)


def _open_uniform(raw: np.ndarray) -> np.ndarray:
    """Float64 in (0, 1), neither end included."""
    return ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _standard_normal(raw: np.ndarray, wide: bool) -> np.ndarray:
    """Box and Muller's transform of one word (float32: 32 bits of radius, 24 of angle) or of two (float64)."""
    if wide:
        radius, angle = (
            _open_uniform(np.ascontiguousarray(raw[..., 0])),
            _uniform(np.ascontiguousarray(raw[..., 1]), 53),
        )
        return np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)
    radius = ((raw >> np.uint64(32)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    angle = (raw & np.uint64(0xFFFFFF)).astype(np.float32) * np.float32(2.0**-24)
    radius = np.minimum(radius, np.float32(1.0))
    return np.sqrt(np.float32(-2.0) * np.log(radius)) * np.cos(np.float32(2.0 * np.pi) * angle)


def _tensor(here: Here, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.from_numpy(np.ascontiguousarray(values)).to(device=here.device, dtype=dtype).reshape(here.output_shape())
    )


def _words(here: Here, key: int) -> np.ndarray:
    """One word for each of this device's elements; of a 0-d tensor an array of one, for numpy makes a 0-d array a number."""
    return words(key, here.outputs[0][1], here.output_box()).reshape(here.output_shape() or (1,))


# Device functions. Each takes the key first and the dtype last and makes output 0's part.


@device_function("dtorch.uniform")
def uniform(here: Here, key: int, low: float, high: float, dtype: torch.dtype) -> torch.Tensor:
    """Uniform in [low, high). A value that rounding brought to ``high`` is ``low``, as in torch's CUDA kernel."""
    if dtype.is_complex:
        return _complex(here, uniform, key, low, high, dtype)
    unit = _tensor(
        here, _uniform(_words(here, key), _DIGITS[dtype]), torch.float64 if dtype == torch.float64 else torch.float32
    )
    values = (unit * (high - low) + low).to(dtype)
    return torch.where(values >= high, low, values) if high > low else values


@device_function("dtorch.normal")
def normal(here: Here, key: int, mean: float, std: float, dtype: torch.dtype) -> torch.Tensor:
    """Normal. A complex value has half of the variance in each part, as in torch."""
    if dtype.is_complex:
        return _complex(here, normal, key, mean, std / math.sqrt(2.0), dtype)
    return _tensor(here, _normal(here, key, dtype) * std + mean, dtype)


def _normal(here: Here, key: int, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.float64:
        return _standard_normal(words(key, here.outputs[0][1], here.output_box(), 2), wide=True)
    return _standard_normal(_words(here, key), wide=False)


def _complex(
    here: Here, make: Callable[..., torch.Tensor], key: int, first: float, second: float, dtype: torch.dtype
) -> torch.Tensor:
    """Complex values as pairs: real values of a tensor with one more dim."""
    placements, shape = here.outputs[0]
    pairs = Here(here.mesh, here.coordinate, here.device, (), [(placements, (*shape, 2))])
    values = make(pairs, key, first, second, dtype.to_real())
    return (
        torch.view_as_complex(values)
        if values.numel()
        else torch.empty(values.shape[:-1], dtype=dtype, device=here.device)
    )


@device_function("dtorch.log_normal")
def log_normal(here: Here, key: int, mean: float, std: float, dtype: torch.dtype) -> torch.Tensor:
    return _tensor(here, np.exp(_normal(here, key, dtype) * std + mean), dtype)


@device_function("dtorch.bernoulli")
def bernoulli(here: Here, key: int, p: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """1 with probability ``p``: a number, or this device's part of a tensor of probabilities."""
    unit = _tensor(here, _uniform(_words(here, key), 53), torch.float64)
    return (unit < (p.double() if isinstance(p, torch.Tensor) else p)).to(dtype)


@device_function("dtorch.exponential")
def exponential(here: Here, key: int, lambd: float, dtype: torch.dtype) -> torch.Tensor:
    return _tensor(here, np.log(_open_uniform(_words(here, key))) / -lambd, dtype)


@device_function("dtorch.geometric")
def geometric(here: Here, key: int, p: float, dtype: torch.dtype) -> torch.Tensor:
    """The number of trials up to the first success: 1 or more."""
    trials = np.log(_open_uniform(_words(here, key))) / (math.log1p(-p) if p < 1 else -math.inf)
    return _tensor(here, np.maximum(np.ceil(trials), 1.0), dtype)


@device_function("dtorch.cauchy")
def cauchy(here: Here, key: int, median: float, sigma: float, dtype: torch.dtype) -> torch.Tensor:
    return _tensor(here, np.tan(np.pi * (_open_uniform(_words(here, key)) - 0.5)) * sigma + median, dtype)


@device_function("dtorch.random_integers")
def random_integers(here: Here, key: int, low: int | None, high: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Integers in [low, high), of any dtype; without ``high`` up to the largest that torch's ``random_`` gives."""
    low = 0 if low is None else low
    count = (_largest(dtype) + 1 if high is None else high) - low
    raw = _words(here, key)
    if count < 1 << 64:
        raw = raw % np.uint64(count)
    # Unsigned arithmetic wraps around where int64 holds the right answer.
    values = (raw + np.uint64(low % (1 << 64))).view(np.int64)
    return _tensor(here, values, dtype)


def _largest(dtype: torch.dtype) -> int:
    """The largest value that ``random_()`` gives, as torch documents it."""
    if dtype == torch.bool:
        return 1
    return 1 << _DIGITS[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max


@device_function("dtorch.randperm")
def randperm(here: Here, key: int, dtype: torch.dtype) -> torch.Tensor:
    """This device's part of a permutation of ``0 … n-1``, n being the layout's length: the order of n words."""
    ((low, high),) = here.output_box()
    (length,) = here.outputs[0][1]
    return _tensor(here, np.argsort(words(key, (length,), ((0, length),))[:, 0], kind="stable")[low:high], dtype)


@device_function("dtorch.seeded")
def seeded(here: Here, key: int, op: str, *args: Any, **kwargs: Any) -> Any:
    """Run a torch op that takes a ``generator`` on replicated inputs, with one seeded by the key: the same on every device."""
    return resolve(op)(*args, generator=torch.Generator(here.device).manual_seed(key), **kwargs)
