"""Read tables of the documentation's pages."""

from __future__ import annotations

import itertools
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def cells_of(page: str, heading: str, after: str | None = None) -> list[list[str]]:
    """Return the cells of the first table with this header row, after the text `after` if given."""
    text = (DOCS / page).read_text()
    found = (text if after is None else text.partition(after)[2]).partition(heading)[2]
    lines = itertools.takewhile(bool, found.splitlines()[2:])
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
