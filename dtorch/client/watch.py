"""Who records the commands of this thread (`dtorch.capture`): at most one recorder a thread."""

from __future__ import annotations

from threading import get_ident
from typing import Any

#: By thread. Empty nearly always, which is all that an op looks at.
recorders: dict[int, Any] = {}


def recorder() -> Any:
    """The recorder of this thread, or None."""
    return recorders.get(get_ident()) if recorders else None


def refuse(reason: str) -> None:
    """What happens now cannot be part of a captured program, if this thread records one."""
    found = recorder()
    if found is not None:
        found.refuse(reason)
