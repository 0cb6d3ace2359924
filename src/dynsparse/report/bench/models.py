"""Tables of whole models: their steps and their memory."""

from __future__ import annotations

from typing import Any

Figures = dict[str, Any]
Table = tuple[list[str], list[list[str]]]

_SIZES = ("layer", "density", "block", "dtype")
_SIZE_NAMES = ["model", "density", "block", "type"]


def _sizes(cell: Figures) -> list[str]:
    return [f"{cell[key]:g}" if key == "density" else f"{cell[key]}" for key in _SIZES]


def _by_model(cells: list[Figures]) -> list[Figures]:
    """The cells of each model together, in the order in which the models come."""
    models = list(dict.fromkeys(cell["layer"] for cell in cells))
    return sorted(cells, key=lambda cell: models.index(cell["layer"]))


def _ratio(figure: Figures, disturbed: bool) -> str:
    texts = [f"{figure[key]:.2f}" for key in ("median", "low", "high")]
    return f"{texts[0]} ({texts[1]} to {texts[2]})" + "\\*" * disturbed


def steps_table(cells: list[Figures]) -> Table:
    """A training step: of the blocks, and of the whole model."""
    who = ["masked", "dense"]
    head = [*_SIZE_NAMES, "ms, blocks", *[f"{name}, blocks" for name in who]]
    head += ["ms, whole", *[f"{name}, whole" for name in who]]
    rows = []
    for cell in _by_model(cells):
        row = _sizes(cell)
        for part in (cell, cell["whole"]):
            row.append(milliseconds(part["times"]["dynsparse"]["median"]))
            row += [_ratio(part["ratios"][name], cell["disturbed"]) for name in who]
        rows.append(row)
    return head, rows


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def memory_table(cells: list[Figures]) -> Table:
    """Peaks in GB, and how many times smaller the state of the blocks is than when dense."""
    who = ["dynsparse", "masked", "dense"]
    head = [*_SIZE_NAMES, *[f"{name}, GB" for name in who], "state of the blocks, MB",
            "masked / that", "dense / that"]  # fmt: skip
    rows = []
    for cell in _by_model(cells):
        found = cell["memory"]
        row = _sizes(cell) + [f"{found[name]['peak'] / 1e9:.2f}" for name in who]
        own = found["dynsparse"]["blocks"]
        row.append(f"{own / 1e6:.0f}")
        row += [f"{found[name]['blocks'] / own:.1f}" for name in who[1:]]
        rows.append(row)
    return head, rows
