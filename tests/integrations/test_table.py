"""docs/models.md says what models gather today."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from . import table

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize("name", ["Mixtral", "Phi3", "GPT2", "T5"])
def test_the_page_is_current(name: str) -> None:
    lines = PAGE.read_text().splitlines()
    for row in table.rows([name]):
        assert str(row) in lines


def test_what_has_to_gather_nothing_does_not() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines()]
    found = {row[0].removeprefix("| "): row[2:] for row in rows if row[1:2] == ["auto"]}
    for name in ("Llama", "Qwen2", "Mistral", "Mixtral"):
        assert found[name] == ["none", "none", "5 |"]
