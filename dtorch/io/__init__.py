"""Tensors on disk: safetensors checkpoints, which each worker reads and writes its own part of, and training that goes on."""

from .weights import Loaded, load, save

__all__ = ["Loaded", "load", "save"]
