"""Fills in the tables of a Markdown page from the figures of `dynsparse bench`.

A table stands between two comments, `<!-- bench: VIEW NAME ... -->` and `<!-- /bench -->`: one of
the views of `tables`, and the benchmarks it shows, or one of `machines`, of the same benchmarks on
every machine. `@FILE` after the names takes another machine's figures, those of FILE.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynsparse.files.whole import write_text_whole
from dynsparse.report.bench import machines
from dynsparse.report.bench.tables import VIEWS

__all__ = ["fill_page"]

Figures = dict[str, Any]

_PART = re.compile(r"(<!-- bench: ([^>]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill_page(page: Path, results: Figures, others: Mapping[str, Figures] | None = None) -> None:
    """Replace every table of the page whose benchmarks are all in `results`; others stay.

    Args:
        others: the figures of other machines, by the names of their files. Tables over machines
            stay as they are without any.

    Raises:
        ValueError: a page without such comments, an unknown view, or nothing to fill in.
    """
    others = others or {}
    text = page.read_text(encoding="utf-8")
    filled = 0

    def fill(found: re.Match[str]) -> str:
        nonlocal filled
        view, *names = found.group(2).split()
        made = _made(page, view, names, results, others)
        if made is None:
            return found.group(0)
        filled += 1
        return f"{found.group(1)}\n{made}\n\n{found.group(3)}"

    text = _PART.sub(fill, text)
    if not filled:
        raise ValueError(
            f"{page}: expected tables between <!-- bench: VIEW NAME --> and <!-- /bench --> of "
            f"benchmarks that were measured ({', '.join(results['benchmarks'])}), got none"
        )
    write_text_whole(page, text)


def _made(
    page: Path, view: str, names: list[str], results: Figures, others: Mapping[str, Figures]
) -> str | None:
    """What stands between two comments; None where the figures for it are not there."""
    if view in machines.VIEWS:
        together = [results, *others.values()]
        ran = [one for one in together if all(name in one["benchmarks"] for name in names)]
        return machines.VIEWS[view](ran, names) if len(ran) > 1 else None
    if view not in VIEWS:
        raise ValueError(
            f"{page}: expected <!-- bench: VIEW NAME --> with one of "
            f"{', '.join([*VIEWS, *machines.VIEWS])}, got {view!r}"
        )
    if names and names[-1].startswith("@"):
        *names, other = names
        if other[1:] not in others:
            return None
        results = others[other[1:]]
    if not all(name in results["benchmarks"] for name in names):
        return None
    return VIEWS[view](results, names)
