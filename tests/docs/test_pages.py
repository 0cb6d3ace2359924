"""What the site's pages promise each other; `make docs` checks the links and the API reference."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_has_its_place_in_the_navigation():
    there = {
        p.relative_to(DOCS).as_posix() for end in ("md", "ipynb") for p in DOCS.rglob(f"*.{end}")
    }
    named = re.findall(r"[\w./-]+\.(?:md|ipynb)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(there)


def test_every_example_is_named():
    text = (DOCS / "examples.md").read_text()
    for example in (ROOT / "examples").glob("*.py"):
        assert f"](../examples/{example.name})" in text


def test_the_figures_of_recipes_are_those_of_the_experiments():
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
