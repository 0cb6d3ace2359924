"""The run over time: its phases, its loops, and the rows the page's script draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynsparse.report.machine_data import ProfileData

__all__ = ["Run", "fold", "phases", "timeline_data"]

_LONGEST_BODY = 256
"""Steps of a loop body that is recognised."""


@dataclass
class Run:
    """A stretch of the run: one step (`body` empty) or a loop of `count` times the body.

    `first` and `length` are its rows of the timeline, all iterations together.
    """

    first: int
    length: int
    count: int = 1
    body: list[Run] = field(default_factory=list)


def fold(order: list[int], first: int = 0) -> list[Run]:
    """Collapse what repeats: steps in time to stretches and loops, loops inside loops included.

    At each step the repetition that covers most is taken, the shorter body first.
    """
    found: list[Run] = []
    at, size = 0, len(order)
    while at < size:
        best_body, best_count = 1, 1
        for body in range(1, min(_LONGEST_BODY, (size - at) // 2) + 1):
            if order[at] != order[at + body]:
                continue
            count = 1
            unit = order[at : at + body]
            while order[at + count * body : at + (count + 1) * body] == unit:
                count += 1
            if count > 1 and count * body > best_count * best_body:
                best_body, best_count = body, count
        length = best_body * best_count
        body_runs = fold(order[at : at + best_body], first + at) if best_count > 1 else []
        found.append(Run(first + at, length, best_count, body_runs))
        at += length
    return found


def short_names(names: list[str]) -> list[str]:
    """Step names without the path that all share."""
    parts = [name.split("/") for name in names]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return ["/".join(p[shared:]) for p in parts]


def phases(profile: ProfileData) -> list[tuple[str, int, int]]:
    """Stretches of the timeline in one part of the program: (name, first row, end row)."""
    names = [name.split("/")[0] for name in short_names([s.name for s in profile.steps])]
    found: list[tuple[str, int, int]] = []
    for row, step in enumerate(profile.order.tolist()):
        if found and found[-1][0] == names[step]:
            found[-1] = (found[-1][0], found[-1][1], row + 1)
        else:
            found.append((names[step], row, row + 1))
    return found


def timeline_data(profile: ProfileData, loops: list[Run]) -> dict[str, Any]:
    """Rows for the script: equal rows are stored once and named by number.

    Keys: `steps` (names), `kinds` ([step, compute, exchange, sync, host]), `order` (one kind a
    run), `phases` and `loops` (first row, end row, and the name or the count).
    """
    rows = np.column_stack([profile.order, profile.rows])
    kinds, order = np.unique(rows, axis=0, return_inverse=True)
    spans: list[list[int]] = []

    def visit(runs: list[Run]) -> None:
        for run in runs:
            if run.body:
                spans.append([run.first, run.first + run.length, run.count])

    visit(loops)
    return {
        "steps": short_names([step.name for step in profile.steps]),
        "kinds": [[_plain(v) for v in kind] for kind in kinds.tolist()],
        "order": order.ravel().tolist(),
        "phases": [[first, end, name] for name, first, end in phases(profile)],
        "loops": spans,
    }


def _plain(value: float) -> float | int:
    return int(value) if value.is_integer() else round(value, 3)
