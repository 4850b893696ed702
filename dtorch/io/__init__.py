"""Tensors on disk: safetensors checkpoints, which each worker reads and writes its own part of, and training that goes on."""

from .state import load_state, save_state
from .weights import Loaded, load, save

__all__ = ["Loaded", "load", "load_state", "save", "save_state"]
