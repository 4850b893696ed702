"""The examples in the docstrings run, in simulation."""

from __future__ import annotations

import doctest
import importlib
import os
import tempfile
from typing import Any

import pytest
import safetensors.torch
import torch

import dtorch
import dtorch.io
from dtorch import nn

MODULES = [
    "mesh",
    "placement",
    "tensor",
    "creation",
    "placing",
    "future",
    "graph",
    "stages",
    "pipeline",
    "client.runtime",
    "client.defaults",
    "client.memory",
    "client.entry",
    "io.weights",
    "io.state",
    "nn.linear",
    "nn.embedding",
    "nn.distribute",
    "nn.summaries",
    "nn.context_parallel",
    "observe.recording",
    "observe.profiling",
    "observe.implicit",
]


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
    for test in doctest.DocTestFinder(exclude_empty=True).find(found, globs=names()):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append)
        assert not result.failed, "".join(report)
        tried += result.attempted
    dtorch.shutdown()
    assert tried
