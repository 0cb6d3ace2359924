"""The head of the machine report: what was computed, and the figures that matter most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from popsparse.report.format import number, say, words

# Key of the summary: label, unit, and whether it is a headline.
_KNOWN: dict[str, tuple[str, str, bool]] = {
    "cycles": ("Cycles", "", True),
    "estimated_cycles": ("Cycles, estimated", "", True),
    "seconds": ("Time", "µs", True),
    "tflops": ("Throughput", "TFLOP/s", True),
    "max_tile_bytes": ("Fullest tile", "B", True),
    "propagation_steps": ("Propagation steps", "", True),
    "max_relative_error": ("Largest relative error", "", True),
    "rows": ("Rows (m)", "", False),
    "cols": ("Columns (k)", "", False),
    "batch": ("Batch (n)", "", False),
    "density": ("Density", "", False),
    "block_size": ("Block size", "", False),
    "dtype": ("Data type", "", False),
    "partials": ("Partials", "", False),
    "target": ("Target", "", False),
    "tiles": ("Tiles of the target", "", False),
    "method": ("Method", "", False),
    "nnz": ("Non-zero values", "", False),
    "spilled": ("Blocks spilled", "", False),
    "propagated": ("Blocks propagated", "", False),
    "groups": ("Groups", "", False),
    "seed": ("Seed", "", False),
}


def _value(key: str, value: Any, unit: str) -> str:
    """One figure as HTML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float, np.number)):
        if key == "density":
            value = float(value)
            one_in = 1 / value if value else 0.0
            exact = abs(one_in - round(one_in)) < 1e-9 and one_in > 1
            return f"{100 * value:.4g} %" + (f" (1/{round(one_in)})" if exact else "")
        if key == "seconds":
            value = value * 1e6
        if key == "max_relative_error":
            return f"{value:.3g}"
        after = f" <small>{say(unit)}</small>" if unit else ""
        # A year-like number is still a count; only a seed is a name.
        return (str(value) if key == "seed" else number(float(value))) + after
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_value("", one, "") for one in value)
    return say(value)


def _by_pass(key: str, value: Any, unit: str) -> str:
    """A figure, or one of each pass."""
    if not isinstance(value, Mapping):
        return f"<b>{_value(key, value, unit)}</b>"
    return "".join(
        f"<b>{_value(key, one, unit)}</b><em>{say(words(str(name)))}</em>"
        for name, one in value.items()
    )


def summary_section(summary: Mapping[str, Any]) -> str:
    """Headlines as cards, the rest as a list. Keys it does not know are shown as they are."""
    cards, rest = [], []
    for key, value in summary.items():
        label, unit, headline = _KNOWN.get(key, (words(str(key)).capitalize(), "", False))
        if (isinstance(value, Mapping) and not value) or (headline and value is None):
            continue
        if headline:
            content = _by_pass(key, value, unit)
            cards.append(f'<div class="card"><h3>{say(label)}</h3>{content}</div>')
            continue
        if isinstance(value, Mapping):
            shown = ", ".join(
                f"{say(words(str(name)))} {_value(key, one, unit)}" for name, one in value.items()
            )
        else:
            shown = _value(key, value, unit)
        rest.append(f"<div><dt>{say(label)}</dt><dd>{shown}</dd></div>")
    if not cards and not rest:
        return ""
    return (
        (f"<dl>{''.join(rest)}</dl>" if rest else "")
        + (f'<div class="cards">{"".join(cards)}</div>' if cards else "")
    )  # fmt: skip
