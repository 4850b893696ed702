"""What dtorch needs of the machine it runs on, checked at import."""

from __future__ import annotations

import sys


def check() -> None:
    """Raise ImportError for a Python or torch that dtorch was not made for."""
    if sys.version_info < (3, 10):  # noqa: UP036 - pip's own check can be circumvented
        raise ImportError(f"dtorch needs Python 3.10 or newer, this is {sys.version.split()[0]}")
    import torch

    if not torch.__version__.startswith("2.13."):
        raise ImportError(
            f"dtorch is made for PyTorch 2.13, this is {torch.__version__}: pip install 'torch>=2.13,<2.14'"
        )
