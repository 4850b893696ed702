"""Samples of aten calls: captured from torch's own operator samples, and a table of shapes that split unevenly."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtorch.sharding.rules import rule_for

from .ground_truth import Sample, inputs_of, tree


class Recorder(TorchDispatchMode):
    """Keeps the calls of ops that have a rule, with copies of their arguments, at most ``limit`` an op."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.samples: dict[Any, list[Sample]] = {}
        self.unruled: set[Any] = set()
        self._seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if rule_for(func) is None:
            self.unruled.add(func)
        else:
            kept = self.samples.setdefault(func, [])
            if len(kept) < self.limit:
                sample = Sample(func, args, kwargs)
                key = repr(sample)
                if key not in self._seen and sum(t.numel() for t in inputs_of(sample)) < 2000:
                    self._seen.add(key)
                    kept.append(Sample(func, tree(args, _copy), tree(kwargs, _copy)))
        return func(*args, **kwargs)


def _copy(t: torch.Tensor) -> torch.Tensor:
    if t.layout is not torch.strided or t.is_quantized:
        return t
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    storage = t.untyped_storage().nbytes() // max(t.element_size(), 1)
    source = (
        t.detach().as_strided((storage - t.storage_offset(),), (1,))
        if storage > t.storage_offset()
        else t.detach().reshape(-1)
    )
    flat = copy.untyped_storage().nbytes() // max(t.element_size(), 1)
    copy.as_strided((flat,), (1,)).copy_(source[:flat])
    return copy


def from_opinfo(
    limit: int = 6, per_op: int = 8, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.int64)
) -> Recorder:
    """Run the samples of torch's own operator tests, forward and backward, and keep what reaches aten."""
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder(limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in op_db:
            for dtype in dtypes:
                if dtype in info.supported_dtypes("cpu"):
                    for sample in _some(info, dtype, per_op):
                        _record(recorder, info, sample)
    return recorder


def _some(info: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    requires_grad = dtype.is_floating_point and info.supports_autograd
    for seed in (random.seed, numpy.random.seed, torch.default_generator.manual_seed):
        seed(0)
    try:
        # Not sample_inputs, which walks the whole stack for every sample.
        samples = info.sample_inputs_func(info, "cpu", dtype, requires_grad)
        for _, sample in zip(range(count), samples, strict=False):
            yield sample
    except Exception:
        return


def _record(recorder: Recorder, info: Any, sample: Any) -> None:
    try:
        with recorder:
            result = info.op(sample.input, *sample.args, **sample.kwargs)
            leaves = [
                t for t in (result if isinstance(result, (list, tuple)) else [result]) if isinstance(t, torch.Tensor)
            ]
            leaves = [t for t in leaves if t.requires_grad and not t.is_complex()]
            if leaves:
                torch.autograd.backward(leaves, [torch.randn_like(t) for t in leaves])
    except Exception:
        return
