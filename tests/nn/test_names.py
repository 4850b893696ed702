"""``dtorch.nn`` is ``torch.nn`` and more: every name, every submodule, and the examples in our docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

import dtorch
import dtorch.nn.functional
from dtorch import nn

OURS = {"Linear", "Embedding", "functional"}


def test_every_name_of_torch_nn() -> None:
    for name in dir(torch.nn):
        if name.startswith("_") or name in OURS:
            continue
        assert getattr(nn, name) is getattr(torch.nn, name)
        assert name in dir(nn)
    for name in dir(torch.nn.functional):
        if not name.startswith("_"):
            assert hasattr(nn.functional, name), name
    assert dtorch.nn is nn
    assert nn.functional.relu is torch.nn.functional.relu


def test_names_of_our_own() -> None:
    star: dict = {}
    exec("from dtorch.nn import *", star)
    for name in (
        "ColumnParallelLinear",
        "RowParallelLinearWithReplicateOutput",
        "Linear",
        "Conv2d",
        "distribute_module",
    ):
        assert star[name] is getattr(nn, name)
    assert dtorch.distribute_module is nn.distribute_module
    assert dtorch.summary is nn.summary


@pytest.mark.parametrize("module", ["linear", "embedding", "distribute", "summaries"])
def test_the_examples_in_docstrings(module: str, simulated: None) -> None:
    found = importlib.import_module(f"dtorch.nn.{module}")
    names = {
        **vars(torch),
        **{name: getattr(dtorch, name) for name in dtorch.__all__},
        "torch": torch,
        "dtorch": dtorch,
    }
    names |= {name: getattr(nn, name) for name in nn._OURS}
    tried = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(found, globs=names):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not result.failed, "".join(report)
        tried += result.attempted
    assert tried
