"""The page of a product, and the file from which it can be made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynsparse.cli.matmul.request import Request


def write(request: Request, contents: Callable[[], dict[str, Any]]) -> None:
    """Write what was asked for of a page's `contents`, which are made if anything was."""
    if request.report is None and request.profile is None:
        return
    from popsparse.report import save_profile, write_report

    found = contents()
    if request.report is not None:
        write_report(request.report, **found)
    if request.profile is not None:
        save_profile(request.profile, **found)
