"""The README's Python runs, one block after the other, and prints what its comments say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dtorch

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.usefixtures("engine")
def test_the_code_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    namespace: dict = {}
    expected = []
    for block in blocks:
        exec(block, namespace)
        expected += re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
    assert len(expected) == 5
    printed = capsys.readouterr().out
    assert printed.startswith("x=tensor([[0.")
    for text in expected[:4]:
        assert f"\n{text}\n" in printed
    assert "tensor(3456., shape=()" in printed
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(6x2 and 6x2\)"):
        exec("dtorch.ones(6, 2, device_mesh=mesh) @ dtorch.ones(6, 2, device_mesh=mesh)", namespace)
    assert dtorch.is_initialized()
