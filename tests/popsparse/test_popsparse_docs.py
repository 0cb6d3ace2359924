"""The code of the page on sparse products runs in order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "popsparse.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not part of a wheel")
def test_code_of_the_page_runs(capsys):
    space: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    assert space["y"].shape == (32, 256)
    assert space["dw"].shape == tuple(space["values"].shape)
    assert space["profile"].cycles > 0
    assert space["profiles"]["rewire"].from_host_bytes > 0
    assert "Cycles" in capsys.readouterr().out


ROOT = PAGE.parents[1]
FORMULAS = ROOT / "docs" / "popsparse-formulas.md"
CITED = re.compile(r"[Ss]ections? ((?:\d[\d.]*(?:, | and | to )?)+) of docs/popsparse-formulas\.md")


@pytest.mark.skipif(not FORMULAS.exists(), reason="the documentation is not part of a wheel")
def test_cited_formulas_are_on_the_page():
    sections = set(re.findall(r"^##+ ([\d.]+?)\.? ", FORMULAS.read_text(), re.M))
    cited = 0
    for file in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]):
        # Lines run on, in docstrings as in comments.
        text = re.sub(r"\s*\n\s*(# )?", " ", file.read_text())
        found = [
            number for one in CITED.findall(text) for number in re.findall(r"\d+(?:\.\d+)?", one)
        ]
        # No citation escapes the pattern.
        named = text.count("of docs/popsparse-formulas.md") - (file.name == Path(__file__).name)
        assert len(CITED.findall(text)) == named, file
        assert set(found) <= sections, f"{file}: {sorted(set(found) - sections)}"
        cited += len(found)
    assert cited > 20
