"""A dict that forgets what nobody has asked for lately."""

from __future__ import annotations

from typing import Any


class Recent(dict):
    """At most about ``limit`` entries, the least recently used forgotten first, for no more than a dict's own look-up.

    An entry is in the dict itself, the younger generation, or in the older one. When the younger holds half of the limit, it becomes the
    older one, and what that still held is forgotten. So whoever looks does so twice: ``found = recent.get(key)``, and for None
    ``recent.older(key)``, which takes an entry back among the young.

    ``misses`` counts look-ups that found nothing, ``evictions`` entries forgotten for the limit. Hits are not counted: each op would pay
    for it.
    """

    __slots__ = ("limit", "misses", "evictions", "_old")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.misses = self.evictions = 0
        self._old: dict[Any, Any] = {}

    def older(self, key: Any) -> Any:
        """What the older generation has for ``key``; None if it is not there either."""
        found = self._old.pop(key, None)
        if found is None:
            self.misses += 1
        else:
            self.put(key, found)
        return found

    def put(self, key: Any, value: Any) -> None:
        self[key] = value
        if len(self) > self.limit // 2:
            self.evictions += len(self._old)
            self._old = dict(self)
            self.clear()

    def forget(self) -> None:
        """Drop everything; the counts go on."""
        self.clear()
        self._old = {}

    @property
    def kept(self) -> int:
        """How many entries there are."""
        return len(self) + len(self._old)

    def __repr__(self) -> str:
        return f"{self.kept} kept of at most {self.limit}, {self.misses} misses, {self.evictions} evictions"
