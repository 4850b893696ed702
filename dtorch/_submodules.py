"""``from dtorch.optim import Adam``: the submodules of ``torch``, the same module objects, under our name too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

OURS, TORCHS = "dtorch.", "torch."


class _TheSame(Loader):
    """Loads nothing: the module is there."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, getattr(module, "__spec__", None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # importlib has put the alias's there


class _Finder(MetaPathFinder):
    """First of all finders: ``torch.nn.utils.__path__`` would let Python's own make a second copy of ``torch.nn.utils.rnn``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(OURS):
            return None
        parent = sys.modules[name.rpartition(".")[0]]
        if (parent.__name__ + ".").startswith(OURS) and PathFinder.find_spec(name, path) is not None:
            return None  # a module of our own
        theirs = TORCHS + name.removeprefix(OURS)
        if theirs not in sys.modules and importlib.util.find_spec(theirs) is None:
            return None
        return importlib.util.spec_from_loader(name, _TheSame(importlib.import_module(theirs)))


def install() -> None:
    sys.meta_path.insert(0, _Finder())
