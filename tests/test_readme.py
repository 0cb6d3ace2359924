"""The code of README, docs and examples runs unchanged."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from dynsparse.training.algorithms import BY_NAME

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ARGUMENTS = {
    "weight_sparse_gpt.py": ["--width", "64", "--heads", "4", "--density", "0.05", "--steps", "50"]
}


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """Return (number of the first code line, code) of every ```python block."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start()) + 2, match.group(1)) for match in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__page__"}
    for line, code in python_blocks(page):
        # Blank lines in front, so that an error names the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example, tmp_path, monkeypatch, capsys):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), *ARGUMENTS.get(example.name, [])])
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    if example.name == "rigl_digits.py":
        accuracy, updates = re.findall(r"[\d.]+", printed.splitlines()[-1])
        assert float(accuracy) > 90
        assert int(updates) == 14


def test_readme_code_equals_an_example():
    blocks = [code for _, code in python_blocks(ROOT / "README.md")]
    assert blocks == [(ROOT / "examples" / "rigl_digits.py").read_text()]


def bench_tables(page: Path) -> dict[str, str]:
    found = re.findall(r"<!-- bench: (.*?) -->\n(.*?)<!-- /bench -->", page.read_text(), re.DOTALL)
    return dict(found)


def test_readme_figures_match_the_pages():
    speed = DOCS / "when-is-it-faster.md"
    tables = bench_tables(ROOT / "README.md")
    assert list(tables) == ["machines elements", "machines-list elements"]
    assert all(bench_tables(speed)[name] == table for name, table in tables.items())

    readme = " ".join((ROOT / "README.md").read_text().split())
    worst = next(
        line.split("|") for line in tables["machines elements"].splitlines() if "| 0.1 |" in line
    )
    low, high = re.search(r"\((\S+) to (\S+)\)", worst[4]).groups()
    assert "with a tenth of the weights" in readme
    assert f"more is {low} to {high} times as fast as a masked one on the machine that" in readme

    section = speed.read_text().partition("## Convolutions")[2].partition("\n## ")[0]
    table = re.search(r"^\| layer .*?\n\n", section, re.DOTALL | re.MULTILINE).group()
    rows = [line.split("|")[2:5] for line in table.splitlines() if re.search(r"\(\d", line)]
    elements, _, blocks = (
        [float(cell.split()[0]) for cell in column] for column in zip(*rows, strict=True)
    )
    assert len(elements) == 7
    assert f"{min(elements)} to {max(elements)} times as fast as a masked one" in readme
    assert f"in blocks of 16 {min(blocks)} to {max(blocks)} times" in readme

    assert len(BY_NAME) == 9
    assert "[nine algorithms]" in readme


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS, *ROOT.glob("*.md")], ids=str)
def test_links_within_the_repository_exist(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
