"""The checks of one ModuleInfo: a training step's outputs, gradients and buffers, and an evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from .adapters import Adapter
from .checks import Check, Grid, Place, arguments, compare, first_line, gradients
from .outcome import Outcome
from .samples import Sample, choose, seed

VARIANTS = ("replicate", "first", "middle", "last", "partial")
"""A module whose parameters are half plain is not a promise, and ``mixed`` says little where there are many parameters."""


def database() -> list[Any]:
    """PyTorch's ModuleInfos."""
    from torch.testing._internal.common_modules import module_db

    return module_db


def run(info: Any, adapter: Adapter, grid: Grid) -> Iterator[Outcome]:
    """Every outcome of a module over ``grid``, in float32 or int64 as its inputs are."""
    narrowed = Grid(grid.meshes, tuple(v for v in grid.variants if v in VARIANTS), grid.checks, grid.sample_limit)
    for kind, training in (("train", True), ("eval", False)):
        if ("backward" if training else "no_grad") not in grid.checks:
            continue
        try:
            cases = _cases(info, training, grid.sample_limit)
        except Exception as error:
            yield Outcome(info.name, "skipped", kind, detail=f"samples: {first_line(error)}")
            continue
        for number, (module, sample) in enumerate(cases):
            tensors = [*module.parameters(), *module.buffers(), *sample.tensors()]
            check = Check(info.name, kind, _body(module, sample, training), tensors, "float32", number)
            yield from compare(check, adapter, narrowed)


def _cases(info: Any, training: bool, limit: int) -> list[tuple[torch.nn.Module, Sample]]:
    seed(info.name)
    made = {}
    for given in info.module_inputs_func(
        info, device="cpu", dtype=torch.float32, requires_grad=training, training=training
    ):
        if given.forward_input is not None:
            sample = Sample(tuple(given.forward_input.args), dict(given.forward_input.kwargs))
            made[id(sample)] = (sample, given.constructor_input)
    cases = []
    for sample in choose((sample for sample, _ in made.values()), limit):
        constructor = made[id(sample)][1]
        module = info.module_cls(*constructor.args, **constructor.kwargs).train(training)
        if info.is_lazy:
            module(*sample.args, **sample.kwargs)  # gives it its parameters
        cases.append((module, sample))
    return cases


def _body(module: torch.nn.Module, sample: Sample, training: bool) -> Any:
    def call(place: Place) -> Any:
        ours = placed(module, place)
        args, kwargs = arguments(sample, place, requires_grad=training)
        with torch.set_grad_enabled(training):
            outputs = ours(*args, **kwargs)
        leaves = [
            leaf
            for leaf in [*ours.parameters(), *tree_flatten((args, kwargs))[0]]
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        return outputs, list(ours.buffers()), gradients(outputs, leaves, place) if training and leaves else None

    return call


def placed(module: torch.nn.Module, place: Place) -> torch.nn.Module:
    """A copy of ``module`` whose parameters, then buffers, have passed through ``place``."""
    ours = copy.deepcopy(module)
    for name, parameter in list(ours.named_parameters()):
        owner, attribute = _owner(ours, name)
        setattr(owner, attribute, torch.nn.Parameter(place(parameter), parameter.requires_grad))
    for name, buffer in list(ours.named_buffers()):
        owner, attribute = _owner(ours, name)
        setattr(owner, attribute, place(buffer))
    return ours


def _owner(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
