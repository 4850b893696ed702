"""What was probably meant by a name that is not there: one letter off, or a part of the right one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

#: How alike names are that differ in a letter or two: more than a part is like the whole.
LETTERS = 0.85


def near(name: str, legal: Iterable[str]) -> str:
    """``; did you mean 'device_mesh'?`` for ``mesh``; empty if nothing is near. Of several the first."""
    names = list(legal)
    found = difflib.get_close_matches(name, names, 1, LETTERS)
    found = found or [one for one in names if name in one.split("_") or one in name.split("_")]
    found = found or difflib.get_close_matches(name, names, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def takes(function: Function, note: str = "") -> Function:
    """``function``, which says what was meant by a keyword that it does not take; ``note``: said where nothing is near.

    Python itself does so from 3.13 on.
    """
    parameters = inspect.signature(function).parameters
    legal = [name for name in parameters if name not in ("self", "cls")]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for keyword in kwargs:
            if keyword not in parameters:
                name = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
                hint = near(keyword, legal) or note
                raise TypeError(f"{name}(): got an unexpected keyword argument {keyword!r}{hint}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
