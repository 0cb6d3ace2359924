"""The variants to compare: the same training with blocks cut in another way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Differences from plain blocks."""

    order: str = ""
    """Initial orders: "random", for each side of each layer; "heads": each block of queries, keys
    and values has features of all heads; "crossed": each block that writes to the residual stream
    writes to evenly spaced features, which other blocks read."""
    captured: bool = False
    """After a fiftieth of the training, reorder inputs and outputs so that the blocks hold most of
    the gradient, and restart the pattern with these blocks."""
    balanced: bool = False
    """Initial patterns are spread evenly over rows and columns of blocks."""
    matched: bool = False
    """Initial patterns read what the previous layer writes."""
    interleave: bool = False
    """--interleave-heads, equivalent to "heads"."""
    match: bool = False
    """--match-blocks, equivalent to "balanced, matched"."""
    method: str = "rigl"
    rounding: str = "up"
    """Rounding of the number of blocks an update replaces: "up" as in the application, "down", or
    "carried" from one update to the next."""
    wide: bool = False
    """With `match`: initial patterns fill whole rows of blocks, each hidden neuron reads all."""
    places: bool = False
    """Columns and rows of blocks move to other features while the patterns change."""


NAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "random": {"order": "random"},
    "heads": {"order": "heads"},
    "crossed": {"order": "crossed"},
    "static": {"method": "static"},
    "rounded down": {"rounding": "down"},
    "carried": {"rounding": "carried"},
    "wide": {"wide": True},
    "captured": {"captured": True},
    "balanced": {"balanced": True},
    "matched": {"matched": True},
    "interleaved": {"interleave": True},
    "matching": {"match": True},
    "places both": {"places": True},
}


def variant(name: str) -> Variant:
    """The variant of a name such as "heads, captured"."""
    made = Variant()
    for part in name.split(", "):
        made = replace(made, **NAMED[part])
    return made
