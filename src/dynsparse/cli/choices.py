"""Flags that take one of a few names, in help that an 80-column terminal shows in full."""

from __future__ import annotations

from typing import Any

__all__ = ["describe_choice"]

# A longer metavar would leave no room for the flags' own names.
_WIDEST = 16


def describe_choice(help: str, values: tuple[Any, ...]) -> dict[str, str]:
    """Help and metavar of a flag: the names stand in the metavar, or in the help if many."""
    names = "|".join(map(str, values))
    if len(names) <= _WIDEST:
        return {"help": help, "metavar": names}
    return {"help": f"{help} One of {', '.join(map(str, values))}.", "metavar": "<name>"}
