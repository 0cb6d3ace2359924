"""Options of every network with attention; each is made by the `panel` that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynsparse.apps.common.option import SWITCH
from dynsparse.training.algorithms import BY_NAME


def interleave_heads(panel: Callable[..., Any]) -> Any:
    return panel(
        False, "Deal the features out to the heads in turn, so that large blocks reach all heads.",
        SWITCH, methods=tuple(BY_NAME),
    )  # fmt: skip


def match_blocks(panel: Callable[..., Any]) -> Any:
    """Not of methods that prune: these draw their first patterns anew."""
    return panel(
        False, "Begin with blocks that read what the layer before writes.", SWITCH,
        methods=tuple(name for name in BY_NAME if BY_NAME[name].least_first is None),
    )  # fmt: skip
