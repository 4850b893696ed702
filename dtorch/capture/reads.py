"""Values that Python reads inside of a captured function, and may decide by: the program stops there in every call, and asks.

What was read is part of what was recorded. A call that reads another number is another recording, and until there is one it is run as it
is, from the start. So nothing outside may have been written in place before the last read, or it would be written twice.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..client.controller import Controller
from ..client.values import Value
from ..errors import DTorchError
from ..sharding.spec import Spec
from .plain import Mismatch


@dataclasses.dataclass(slots=True)
class Read:
    """A number was read: ``found`` in value ``id``, after ``commands`` commands.

    ``source``: where the value is in a call's pool.
    """

    id: int
    spec: Spec
    found: Any
    commands: int
    line: str
    source: int = -1

    def again(self, controller: Controller, value: Value) -> Any:
        """Wait for the number in another call; `Mismatch` if there is none."""
        try:
            return controller.get(value, self.spec).get().item()
        except DTorchError:  # the function itself, run as it is, shall raise it where it reads
            raise Mismatch from None

    def __str__(self) -> str:
        return f"{self.found!r} is read" + (f", at {self.line}" if self.line else "")


def decides(found: Any) -> bool:
    """Whether recordings may be told apart by a number that was read: truth values, counts and flags, not measurements."""
    return isinstance(found, (bool, int)) or (isinstance(found, float) and found.is_integer())


def same(one: Any, other: Any) -> bool:
    """Whether two numbers that were read are the same to any code."""
    return repr(one) == repr(other)
