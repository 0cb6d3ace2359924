"""How the values of options are read, with errors that say what was expected and what was got."""

from __future__ import annotations

import typer

__all__ = ["integer", "number"]


def integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected an integer, got {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a number, got {text!r}") from None
