"""Other libraries: each is imported by its own module here alone, and only when it is used."""

from . import transformers

__all__ = ["transformers"]
