"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import os
import tempfile

import pytest
import safetensors.torch
import torch

import dtorch


@pytest.mark.parametrize("module", ["weights", "state"])
def test_the_examples_in_docstrings(module: str, simulated: None) -> None:
    found = importlib.import_module(f"dtorch.io.{module}")
    names = {name: getattr(dtorch, name) for name in dtorch.__all__} | {
        name: getattr(dtorch.io, name) for name in dtorch.io.__all__
    }
    names |= {"torch": torch, "os": os, "tempfile": tempfile, "safetensors": safetensors}
    tried = 0
    for test in doctest.DocTestFinder(exclude_empty=True).find(found, globs=names):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not result.failed, "".join(report)
        tried += result.attempted
    assert tried
