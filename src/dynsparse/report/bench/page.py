"""Fills in the tables of a Markdown page from the figures of `dynsparse bench`.

A table stands between two comments, `<!-- bench: VIEW NAME ... -->` and `<!-- /bench -->`: one of
the views of `bench_tables`, and the benchmarks it shows.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dynsparse.files.whole import write_text_whole
from dynsparse.report.bench.tables import VIEWS

__all__ = ["fill_page"]

_PART = re.compile(r"(<!-- bench: ([^>]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill_page(page: Path, results: dict[str, Any]) -> None:
    """Replace every table of the page whose benchmarks are all in `results`; others stay.

    Raises:
        ValueError: a page without such comments, an unknown view, or nothing to fill in.
    """
    text = page.read_text(encoding="utf-8")
    filled = 0

    def fill(found: re.Match[str]) -> str:
        nonlocal filled
        view, *names = found.group(2).split()
        if view not in VIEWS:
            raise ValueError(
                f"{page}: expected <!-- bench: VIEW NAME --> with one of {', '.join(VIEWS)}, "
                f"got {view!r}"
            )
        if not all(name in results["benchmarks"] for name in names):
            return found.group(0)
        filled += 1
        return f"{found.group(1)}\n{VIEWS[view](results, names)}\n\n{found.group(3)}"

    text = _PART.sub(fill, text)
    if not filled:
        raise ValueError(
            f"{page}: expected tables between <!-- bench: VIEW NAME --> and <!-- /bench --> of "
            f"benchmarks that were measured ({', '.join(results['benchmarks'])}), got none"
        )
    write_text_whole(page, text)
