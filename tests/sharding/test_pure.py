"""Planning is pure: neither planning nor programs know of clients, engines and workers."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import dtorch

PACKAGE = Path(dtorch.__file__).parent
PURE = [path for folder in ("sharding", "program") for path in sorted((PACKAGE / folder).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    """The modules of dtorch that ``path`` imports anywhere in it, ``sharding.plan`` for one."""
    package = path.relative_to(PACKAGE).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name.removeprefix("dtorch.") for name in node.names if name.name.startswith("dtorch.")}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = [*package[: len(package) - node.level + 1], *module.split(".")]
            elif module.partition(".")[0] == "dtorch":
                base = module.split(".")[1:]
            else:
                continue
            found |= {".".join(filter(None, [*base, name.name])) for name in node.names}
    return found


@pytest.mark.parametrize("path", PURE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_planning_imports_no_client_engine_or_worker(path: Path) -> None:
    assert not {name for name in imported(path) if name.partition(".")[0] in ("client", "engine", "worker")}


def test_imports_are_found() -> None:
    assert "placement.shard" in imported(PACKAGE / "sharding" / "attention.py")
    assert "client.lines" in imported(PACKAGE / "observe" / "recording.py")
