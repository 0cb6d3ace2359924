"""`dynsparse visualise`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def visualise(
    records_path: Annotated[
        Path, typer.Option(help="Folder of the record, as given to the training.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures; by default `pictures` in the record's folder."),
    ] = None,
    animate: Annotated[
        bool, typer.Option("--animate", help="Also write the connectivity over time as a GIF.")
    ] = False,
    cmap: Annotated[str, typer.Option(help="Colour map, by matplotlib's name.")] = "magma",
) -> None:
    """Draw how the connectivity of a recorded training evolved."""
    from dynsparse.report.training.connectivity import visualise as draw

    for path in draw(records_path, output, cmap=cmap, animate=animate):
        print(path)
