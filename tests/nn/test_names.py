"""``dtorch.nn`` is ``torch.nn`` and more: every name and every submodule."""

from __future__ import annotations

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
