"""The one form in which profiles lie in files: JSON that says what it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FORMAT, VERSION = "dynsparse-profile", 1


def document(
    title: str, runs: Iterable[tuple[str, Mapping[str, Any]]], **more: Any
) -> dict[str, Any]:
    """Plain data for a file.

    Args:
        title: of the page that is made of it.
        runs: the program's name and `Profile.to_dict()` of each.
        more: what else a page shows: "summary", "plan", "predicted", "encoding"; None is left out.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": title,
        "summary": {},
        **{key: value for key, value in more.items() if value is not None},
        "runs": [{"program": name, **run} for name, run in runs],
    }
