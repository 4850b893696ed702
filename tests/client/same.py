"""`same`: one program, run on plain tensors and on dtorch tensors, gives the same results. The expected value is always plain torch's."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dtorch
from dtorch import Partial, Replicate, Shard

#: Name → (mesh, placements of a tensor with that many dims).
LAYOUTS: dict[str, tuple[Any, Callable[[int], list[Any]]]] = {
    "first": ([0, 1], lambda ndim: [Shard(0) if ndim else Replicate()]),
    "last": ([0, 1], lambda ndim: [Shard(ndim - 1) if ndim else Replicate()]),
    "replicated": ([0, 1], lambda ndim: [Replicate()]),
    "partial": ([0, 1], lambda ndim: [Partial()]),
    "uneven": ([0, 1, 2], lambda ndim: [Shard(0) if ndim else Replicate()]),
    "grid": ([[0, 1], [2, 3]], lambda ndim: [Shard(0), Shard(ndim - 1)] if ndim else [Replicate()] * 2),
}

every_layout = pytest.mark.parametrize("layout", sorted(LAYOUTS))
every_engine = pytest.mark.usefixtures("engine")


def place(plain: torch.Tensor, layout: str) -> dtorch.Tensor:
    """A dtorch tensor with the values of a plain one, in a layout of the table; whether it requires grad is kept."""
    mesh, placements = LAYOUTS[layout]
    if not plain.is_floating_point() and not plain.is_complex() and layout == "partial":
        placements = LAYOUTS["replicated"][1]  # sums of bools are not bools
    placed = dtorch.distribute_tensor(plain.detach(), dtorch.DeviceMesh("cpu", mesh), placements(plain.ndim))
    return placed.requires_grad_(plain.requires_grad)


def place_module(module: torch.nn.Module, layout: str) -> torch.nn.Module:
    """``module`` itself, with every parameter and buffer placed."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                part._parameters[name] = torch.nn.Parameter(place(parameter.detach(), layout), parameter.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = place(buffer, layout)
    return module


def same(program: Callable[..., Any], layout: str, *inputs: Any, exact: bool = False) -> None:
    """Assert that ``program`` gives the same on ``inputs`` (tensors, modules, others) and on the same inputs placed."""
    expected = outcome(program, [copy.deepcopy(i) for i in inputs])
    placed = []
    for given in inputs:
        given = copy.deepcopy(given)
        if isinstance(given, torch.Tensor):
            given = place(given, layout)
        elif isinstance(given, torch.nn.Module):
            given = place_module(given, layout)
        placed.append(given)
    compare(outcome(program, placed), expected, exact)


def outcome(program: Callable[..., Any], inputs: list[Any]) -> Any:
    try:
        return program(*inputs)
    except Exception as error:  # what is raised is compared too
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        return error


def compare(actual: Any, expected: Any, exact: bool = False) -> None:
    """Assert equality of nested results; tensors by value, dtype, shape and stride."""
    if isinstance(expected, Exception):
        assert isinstance(actual, Exception), f"plain torch raises {expected!r}, dtorch gives {actual!r}"
        assert (type(actual), _message(actual)) == (type(expected), _message(expected))
    elif isinstance(actual, Exception):
        raise actual
    elif isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), (type(actual), expected)
        assert (actual.dtype, actual.shape, actual.requires_grad) == (
            expected.dtype,
            expected.shape,
            expected.requires_grad,
        )
        assert isinstance(actual, torch.nn.Parameter) == isinstance(expected, torch.nn.Parameter)
        got = actual.detach()
        if isinstance(got, dtorch.Tensor):
            if expected.numel() > 1:
                assert actual.stride() == expected.stride()
            got = got.to_torch()
        if exact:
            assert torch.equal(got, expected.detach()), (got, expected)
        torch.testing.assert_close(got, expected.detach(), equal_nan=True)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in expected:
            compare(actual[name], expected[name], exact)
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            compare(a, e, exact)
    else:
        if isinstance(expected, float):
            assert actual == pytest.approx(expected, rel=1e-5, nan_ok=True)
        else:
            assert (type(actual), actual) == (type(expected), expected)


def _message(error: Exception) -> str:
    """Its words, without the name of the autograd node: torch's own for strided views is AsStrided, ours stays what made the view."""
    return re.sub(r"which is output 0 of \w+", "", str(error))


def each(*programs: Callable[..., Any]) -> Any:
    """Parametrise a test over programs, each named by its line in the file."""
    lines = [getattr(p, "__code__", None) for p in programs]
    ids = [p.__name__ if c is None else f"line{c.co_firstlineno}" for p, c in zip(programs, lines, strict=True)]
    return pytest.mark.parametrize("program", programs, ids=ids)
