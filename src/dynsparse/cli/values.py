"""How the values of options are read, with errors that say what was expected and what was got."""

from __future__ import annotations

from typing import Any

import typer

from dynsparse.files.limits import parse_json
from dynsparse.files.shorten import shortened


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


def json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(
            f'--{flag}: expected a JSON object such as {{"period": 0.5}}, got {shortened(text)}'
        )
    return value


def arguments(flag: str, pairs: list[str], example: str) -> dict[str, Any]:
    """Arguments given as name=json."""
    found = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        try:
            found[name] = parse_json(text)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise ValueError(
                f"--{flag}: expected name=json such as {example}, got {shortened(pair)}"
            )
    return found
