"""Settings of a cluster: from `init`, else from ``DTORCH_…`` environment variables, else the defaults here."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from .client import lines

ENGINES = ("processes", "simulate")
RANDOM = ("counter", "torch")
LEAST_ARENA_BYTES = 1 << 16

#: Environment variables that are not arguments of `init`.
OTHER_VARIABLES = {"DTORCH_LOG"}


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """What `init` takes. See `dtorch.init` for the meaning of each."""

    engine: str = "processes"
    devices: int = 64
    threads_per_worker: int = 1
    worker_imports: tuple[str, ...] = ()
    sync: bool = False
    random: str = "counter"
    arena_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.engine, str):
            raise TypeError(f"init(): engine must be a str, got {self.engine!r}")
        if self.engine not in ENGINES:
            raise ValueError(f"init(): engine must be one of {', '.join(map(repr, ENGINES))}, got {self.engine!r}")
        for name in ("devices", "threads_per_worker"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"init(): {name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"init(): {name} must be at least 1, got {value}")
        if self.arena_bytes is not None:
            if isinstance(self.arena_bytes, bool) or not isinstance(self.arena_bytes, int):
                raise TypeError(f"init(): arena_bytes must be an int, got {self.arena_bytes!r}")
            if self.arena_bytes < LEAST_ARENA_BYTES:
                raise ValueError(f"init(): arena_bytes must be at least {LEAST_ARENA_BYTES}, got {self.arena_bytes}")
        if not isinstance(self.worker_imports, tuple) or not all(isinstance(m, str) for m in self.worker_imports):
            raise TypeError(f"init(): worker_imports must be a list of module names, got {self.worker_imports!r}")
        for module in self.worker_imports:
            if not _exists(module):
                raise ValueError(
                    f"init(): worker_imports names {module!r}, which workers could not import: there is no such module on sys.path"
                )
        if not isinstance(self.sync, bool):
            raise TypeError(f"init(): sync must be a bool, got {self.sync!r}")
        if self.random not in RANDOM:
            raise ValueError(f"init(): random must be one of {', '.join(map(repr, RANDOM))}, got {self.random!r}")


def from_environment(**given: Any) -> Config:
    """A `Config` of the arguments given (None: not given), the environment, and the defaults."""
    _warn_of_unknown_variables()
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Config):
        value = given.get(field.name)
        if value is None:
            text = os.environ.get(f"DTORCH_{field.name.upper()}")
            if text is None:
                continue
            value = _parse(field.name, field.type, text)
        elif field.name == "worker_imports":
            if not isinstance(value, (str, list, tuple, set, frozenset)):
                raise TypeError(f"init(): worker_imports must be a list of module names, got {value!r}")
            value = (value,) if isinstance(value, str) else tuple(value)
        values[field.name] = value
    return Config(**values)


def _exists(module: str) -> bool:
    """Whether a module can be found, without importing any part of it here."""
    places = None
    parts = module.split(".")
    if not all(parts):
        return False
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        specs = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        found = next((spec for spec in specs if spec is not None), None)
        if found is None or ((places := found.submodule_search_locations) is None and end < len(parts)):
            return False
    return True


def _warn_of_unknown_variables() -> None:
    """A misspelt setting would be ignored silently."""
    known = {f"DTORCH_{field.name.upper()}" for field in dataclasses.fields(Config)} | OTHER_VARIABLES
    for name in sorted(set(os.environ)):
        if name.startswith("DTORCH_") and not name.startswith("DTORCH_TEST_") and name not in known:
            lines.warn(f"{name} is no setting of dtorch; there are {', '.join(sorted(known))}")


def _parse(name: str, kind: Any, text: str) -> Any:
    if kind in ("int", "int | None"):
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"DTORCH_{name.upper()} must be an integer, got {text!r}") from None
    if kind == "bool":
        if text.lower() not in ("0", "1", "true", "false", ""):
            raise ValueError(f"DTORCH_{name.upper()} must be 0 or 1, got {text!r}")
        return text.lower() in ("1", "true")
    if name == "worker_imports":
        return tuple(part for part in text.split(",") if part)
    return text
