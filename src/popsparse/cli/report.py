"""`dynsparse report`: explain a stored profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dynsparse.options import OUTPUT_FILE


def report(
    profile: Annotated[
        Path,
        typer.Argument(
            help="A stored profile, from `dynsparse matmul --profile`, `save_profile`, or an "
            "engine's autoReport.",
            metavar="FILE",
        ),
    ],
    compare: Annotated[
        Path | None,
        typer.Option(help="Compare with another one.", metavar="<file>", show_default="none"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Also write the report page: one HTML file.",
            metavar="<file.html>",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Show what a run on the tile machine cost and why, from a stored profile."""
    from popsparse.report import compare as compare_profiles
    from popsparse.report import comparison_text, load_profile, profile_text, write_report

    if output is not None:
        OUTPUT_FILE.check("output", output)
        for source in (profile, compare):
            if source is not None and source.resolve() == output.resolve():
                raise ValueError(f"--output: expected another file than the profile {source}")
    stored = load_profile(profile)
    compared = None if compare is None else compare_profiles(stored, load_profile(compare))
    if output is not None:
        write_report(output, **stored.page, compared=compared)
    print(profile_text(stored.title, stored.profiles))
    if compared is not None:
        print("\n" + comparison_text(compared))
