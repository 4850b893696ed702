"""``dtorch.nn`` is ``torch.nn`` and more: every name, every submodule, and the examples in our docstrings."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys

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


SUBMODULES = """
import sys, dtorch, torch
before = torch.nn.utils.__spec__
from dtorch.nn.utils import clip_grad_norm_
from dtorch.nn.utils.rnn import pad_sequence
import dtorch.nn.init as init, dtorch.nn.functional as F, dtorch.nn.parameter
from dtorch.nn.modules.linear import Linear
assert clip_grad_norm_ is torch.nn.utils.clip_grad_norm_ and pad_sequence is torch.nn.utils.rnn.pad_sequence
assert init is torch.nn.init and F.gelu is torch.nn.functional.gelu and dtorch.nn.parameter is torch.nn.parameter
assert Linear is torch.nn.Linear and torch.nn.utils.__spec__ is before
try:
    import dtorch.nn.no_such_module
except ModuleNotFoundError as error:
    assert "dtorch.nn.no_such_module" in str(error)
else:
    raise SystemExit("imported")
"""


def test_submodules_are_the_same_modules() -> None:
    subprocess.run([sys.executable, "-c", SUBMODULES], check=True, timeout=120)


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
