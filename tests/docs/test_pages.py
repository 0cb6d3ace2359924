"""Consistency of the site's pages; `make docs` checks links and the API reference."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_is_in_the_navigation():
    there = {
        p.relative_to(DOCS).as_posix() for end in ("md", "ipynb") for p in DOCS.rglob(f"*.{end}")
    }
    named = re.findall(r"[\w./-]+\.(?:md|ipynb)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(there)


def test_every_example_is_listed():
    text = (DOCS / "examples.md").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        assert f"](../examples/{example.name})" in text


def test_figures_of_recipes_match_the_experiments():
    recipes = re.findall(r"^- (.*?)(?=^- |^#|\Z)", (DOCS / "recipes.md").read_text(), re.M | re.S)
    figures = 0
    for recipe in recipes:
        pages = re.findall(r"\]\(([\w./-]+\.(?:md|ipynb))", recipe)
        assert pages, f"a recipe without its experiment: {recipe}"
        text = "".join((DOCS / page).read_text() for page in pages)
        for figure in re.findall(r"\d+(?:[.,]\d+)+", recipe):
            assert figure in text, f"{figure} is not on {pages}"
            figures += 1
    assert figures > 20


def test_names_on_the_architecture_page_exist():
    """Paths and names in backticks: a package, a file or a name in the source."""
    text = re.sub(r"^```.*?^```", "", (DOCS / "architecture.md").read_text(), flags=re.M | re.S)
    source = {ROOT / "Makefile", *(ROOT / "csrc").rglob("*.h")}
    source |= {file for folder in ("src", "tests") for file in (ROOT / folder).rglob("*.py")}
    words = set().union(*(re.findall(r"\w+", file.read_text()) for file in source))
    words |= {part.stem for part in [*ROOT.glob("*"), *ROOT.glob("*/*"), *source]}
    words |= {part.name for file in source for part in file.parents}
    for said in re.findall(r"`([^`]+)`", text):
        missing = [word for word in re.findall(r"[^\W\d]\w+", said) if word not in words]
        assert not missing, f"`{said}`: nothing is called {', '.join(missing)}"
