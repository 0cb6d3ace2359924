"""The same benchmarks on several machines, the one that gains least first."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from dynsparse.report.bench.tables import (
    NAMES,
    between,
    cells_of,
    in_columns,
    machine_name,
    measured_line,
    present,
    summaries_of,
    table,
)

__all__ = ["VIEWS", "worst_first"]

Figures = dict[str, Any]


def worst_first(machines: list[Figures], names: list[str]) -> list[Figures]:
    """By the median over masked dense of all cells of the benchmarks `names`."""
    return sorted(
        machines,
        key=lambda one: statistics.median(
            cell["ratios"]["masked"]["median"] for cell in cells_of(one, names)
        ),
    )


def _side_by_side(machines: list[Figures], names: list[str]) -> str:
    """By density and block: a row per machine, the median over cells with their range."""
    ran = {machine_name(one): summaries_of(one, names) for one in worst_first(machines, names)}
    keys = dict.fromkeys(key for groups in ran.values() for key in groups)
    blocks = len({block for block, _ in keys}) > 1
    who = present(summary for groups in ran.values() for _, summary in groups.values())
    rows = []
    for block, density in keys:
        for name, groups in ran.items():
            if (block, density) not in groups:
                continue
            count, summary = groups[block, density]
            row = [*[f"{block}"] * blocks, f"{density:g}", name, f"{count}"]
            rows.append([*row, *in_columns(summary, who)])
    head = [*["block"] * blocks, "density", "machine", "cells", *[NAMES[name] for name in who]]
    return table(head, rows)


def _headline(machines: list[Figures], names: list[str]) -> str:
    """By density how many times as fast as masked dense elements are, one machine after the other.

    Every part begins with the machine that gains least.
    """
    ran = {machine_name(one): summaries_of(one, names) for one in worst_first(machines, names)}
    densities = dict.fromkeys(density for groups in ran.values() for _, density in groups)
    parts = []
    for place, density in enumerate(densities):
        times = {
            name: between(*groups[1, density][1]["masked"])
            for name, groups in ran.items()
            if (1, density) in groups
        }
        if place == 0:
            each = "; ".join(f"{of} on {name}" for name, of in times.items())
            parts.append(f"At density {density:g} this many times as fast as masked dense: {each}")
        elif times:
            parts.append(f"At density {density:g} it is {' and '.join(times.values())}")
    return " ".join(f"{part}." for part in parts)


def _each(machines: list[Figures], names: list[str]) -> str:
    """Which machines these are: a line each, as in `_side_by_side`."""
    lines = []
    for one in worst_first(machines, names):
        lines.append(f"- {measured_line(one, names)}")
    return "\n".join(lines)


def _memory(machines: list[Figures], names: list[str]) -> str:
    """How far the peak of the memory rises by `memory`, the most first."""
    found = [(one, one["benchmarks"][name]) for one in machines for name in names]
    found.sort(key=lambda pair: -pair[1]["figures"]["peak"])
    rows = [
        [machine_name(one), f"{memory['figures']['peak'] / 1e6:.0f} MB", memory["measured"]]
        for one, memory in found
    ]
    return table(["machine", "peak growth", "measured"], rows)


VIEWS: dict[str, Callable[[list[Figures], list[str]], str]] = {
    "machines": _side_by_side,
    "machines-headline": _headline,
    "machines-list": _each,
    "machines-memory": _memory,
}
"""What can be shown of benchmarks that several machines ran: view(results, names) -> Markdown."""
