"""`dynsparse lm`; what its flags mean is in dynsparse.apps.lm."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dynsparse.apps import lm as app
from dynsparse.cli.option_flags import with_flags

_PRESET = Annotated[
    str | None,
    typer.Option(
        "--preset",
        help="Settings to start from; every flag below changes one of them. The defaults named "
        "here are those of tiny.",
        rich_help_panel="Network",
        metavar="|".join(app.PRESETS),
        show_default="tiny",
    ),
]


@with_flags(app.Options, {"preset": _PRESET})
def lm(values: dict[str, Any], given: set[str], preset: str | None) -> None:
    """Train a sparse GPT-2-style language model on any text, and let it write."""
    if preset is not None and "restore" in given:
        raise ValueError("--preset: the checkpoint of --restore says it all: leave --preset out")
    app.run(app.preset("tiny" if preset is None else preset, **values), given=given)
