"""Tables of the documentation's pages, as their cells."""

from __future__ import annotations

import itertools
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def cells_of(page: str, heading: str, after: str | None = None) -> list[list[str]]:
    """The cells of the first table with this heading row; behind the text `after`, if given."""
    text = (DOCS / page).read_text()
    found = (text if after is None else text.partition(after)[2]).partition(heading)[2]
    lines = itertools.takewhile(bool, found.splitlines()[2:])
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
