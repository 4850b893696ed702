"""The examples in the docstrings run, in simulation."""

from __future__ import annotations

import doctest
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import dtorch
import dtorch.io
from dtorch import nn

ROOT = Path(dtorch.__file__).parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.rglob("*.py") if ">>> " in path.read_text()
)


def names() -> dict[str, Any]:
    """What an example may use without importing it: torch's names, and ours in their place."""
    ours = {name: getattr(dtorch, name) for name in dtorch.__all__}
    layers = {name: getattr(nn, name) for name in nn._OURS}
    weights = {name: getattr(dtorch.io, name) for name in dtorch.io.__all__}
    modules = {"torch": torch, "dtorch": dtorch, "nn": nn, "os": os, "tempfile": tempfile, "safetensors": safetensors}
    return {**vars(torch), **ours, **layers, **weights, **modules}


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings(module: str) -> None:
    dtorch.shutdown()
    dtorch.init(engine="simulate")
    tried = 0
    found = importlib.import_module(f"dtorch.{module}")
    for test in doctest.DocTestFinder(exclude_empty=True).find(
        found, globs={**vars(found), **names(), "__name__": "__main__"}
    ):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not result.failed, "".join(report)
        tried += len(test.examples)
    dtorch.shutdown()
    assert tried
