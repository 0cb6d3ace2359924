"""`dynsparse report`: what a stored profile says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynsparse.options import OUTPUT_FILE


def report(
    profile: Annotated[
        Path,
        typer.Argument(
            help="A stored profile: of `dynsparse matmul --profile`, `save_profile`, or an "
            "engine's autoReport.",
            metavar="FILE",
        ),
    ],
    compare: Annotated[
        Path | None,
        typer.Option(help="Put another one beside it.", metavar="<file>", show_default="none"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write the page, too: one HTML file.", metavar="<file.html>", show_default="none"
        ),
    ] = None,
) -> None:
    """Say what a run on the tile machine cost and why, from a stored profile."""
    from popsparse.report import compare as compare_profiles
    from popsparse.report import comparison_text, load_profile, profile_text, write_report

    if output is not None:
        OUTPUT_FILE.check("output", output)
    stored = load_profile(profile)
    compared = None if compare is None else compare_profiles(stored, load_profile(compare))
    if output is not None:
        write_report(output, **stored.page, compared=compared)
    print(profile_text(stored.title, stored.profiles))
    if compared is not None:
        print("\n" + comparison_text(compared))
