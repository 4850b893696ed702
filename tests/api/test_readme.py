"""The Python of the README and of the guide runs, one block after the other, and prints what its comments say."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dtorch
from benchmarks import plot

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@pytest.mark.usefixtures("engine")
def test_the_code_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.M | re.S)
    namespace: dict = {}
    expected = []
    for block in blocks:
        exec(block, namespace)
        expected += re.findall(r"^print\(.*\)  # (.*)$", block, re.M)
    assert len(expected) == 6
    printed = capsys.readouterr().out
    assert printed.startswith("x=tensor([[0.")
    for text in expected[:5]:
        assert f"\n{text}\n" in printed
    assert "tensor(3456., shape=()" in printed
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied \(6x2 and 6x2\)"):
        exec("dtorch.ones(6, 2, device_mesh=mesh) @ dtorch.ones(6, 2, device_mesh=mesh)", namespace)
    assert dtorch.is_initialized()


def test_the_code_in_the_guide(capsys: pytest.CaptureFixture[str], simulated: None) -> None:
    text = (ROOT / "docs" / "guide.md").read_text()
    namespace: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(block, namespace)
        printed = capsys.readouterr().out.splitlines()
        expected = re.findall(r"^ *print\(.*\)  # (.*)$", block, re.M)
        assert set(printed) == set(expected)


def test_the_output_of_the_example_in_the_readme() -> None:
    """Without the last digits, which differ from machine to machine."""
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / "train_step.py"], capture_output=True, text=True, check=True
    )
    text = README.read_text()
    for line in ran.stdout.splitlines()[:-1]:
        assert f"\n{line}\n" in text


def test_the_map_in_the_architecture_names_every_module() -> None:
    """Those of a folder in a folder by that folder's name."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Map\n")[2].partition("\n## ")[0]
    named = {word.removesuffix(".py") for told in re.findall(r"`([^`]+)`", text) for word in told.split()}
    modules = [path.relative_to(ROOT / "dtorch").with_suffix("").parts for path in (ROOT / "dtorch").rglob("*.py")]
    expected = {f"{parts[1]}/" if len(parts) > 2 else parts[-1] for parts in modules} - {"__init__"}
    assert [name for name in sorted(expected) if not any(fnmatch.fnmatch(name, word) for word in named)] == []


def test_the_picture_of_the_benchmarks(tmp_path: Path) -> None:
    """It has every result that has a bound in numbers, on the right side of it."""
    pytest.importorskip("matplotlib")
    page = (ROOT / "benchmarks" / "results.md").read_text()
    assert len(plot.bounded(page)) == len(re.findall(r"\| at (?:most|least) [^|]*\|$", page, re.M))
    head = "## it\n\n| | median | quartiles | bound |\n"
    small, large = plot.bounded(
        head
        + "| a | 3 us | 2 to 4.5 | at most 4 |\n| b, c | 1e+01 × | 5 to 40 | at least 20 |\n| d | 1 s | 1 to 1 |  |\n"
    )
    assert (small.section, small.what, small.share, small.low, small.high) == ("it", "a", 0.75, 0.5, 1.125)
    assert (large.what, large.share, large.low, large.high) == ("b, c", 2, 0.5, 4)
    plot.draw(page, tmp_path / "picture.png")
    for picture in (tmp_path / "picture.png", plot.PICTURE):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert "](docs/benchmarks.png)" in README.read_text()
    with pytest.raises(ValueError, match="no row"):
        plot.draw(head, tmp_path / "none.png")
