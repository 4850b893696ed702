"""``dtorch.compile``: a step recorded, and run with one message. Not there yet."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import DTorchError


def compile(*args: Any, **kwargs: Any) -> NoReturn:
    """Not there yet: raises `DTorchError`. ``torch.compile``, which it is not, is for plain tensors."""
    raise DTorchError(
        "dtorch.compile is not there yet: call the function or module as it is (Python runs ahead of the workers); "
        "torch.compile is for plain tensors"
    )
