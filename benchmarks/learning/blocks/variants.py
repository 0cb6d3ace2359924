"""What is compared: the same training, with its blocks cut in another way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Variant", "variant"]


@dataclass(frozen=True)
class Variant:
    """Blocks as they are cut without any of this, but for what is said here."""

    order: str = ""
    """The orders to begin with: "random", each side of each layer by itself; "heads", each block of
    queries, keys and values has features of all heads; "crossed", each block that writes to the
    residual stream writes to features from all over, which other blocks read."""
    captured: bool = False
    """After a fiftieth of the training inputs and outputs are put in the order in which the blocks
    hold most of the gradient; the blocks begin anew where they do."""
    balanced: bool = False
    """The first patterns are spread evenly over rows and columns of blocks."""
    matched: bool = False
    """The first patterns read what the layer before writes."""
    interleave: bool = False
    """--interleave-heads, which is as "heads"."""
    match: bool = False
    """--match-blocks, which is as "balanced, matched"."""
    method: str = "rigl"
    rounding: str = "up"
    """Of how many blocks an update replaces: "up" as the application does, "down", or "carried"
    from one update to the next."""
    wide: bool = False
    """With `match`: the first patterns fill whole rows of blocks, each hidden neuron reads all."""
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
