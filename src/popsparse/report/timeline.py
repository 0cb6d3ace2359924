"""The run over time: its phases, its loops, and the rows the page's script draws."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from popsparse.report.data import ProfileData

_LONGEST_BODY = 64
"""Parts of a loop body that is recognised; a loop inside is one part."""
_MOST_DEPTH, _MOST_SPANS = 3, 5000


@dataclass
class Run:
    """A stretch of the run: one step (`body` empty) or a loop of `count` times the body.

    `first` and `length` are its rows of the timeline, all iterations together; runs with the same
    `key` have the same steps.
    """

    first: int
    length: int
    key: int
    count: int = 1
    body: list[Run] = field(default_factory=list)


def fold(order: list[int]) -> list[Run]:
    """Collapse what repeats: steps in time to stretches and loops, loops inside loops included."""
    keys: dict[Any, int] = {}
    runs = [Run(i, 1, keys.setdefault(step, len(keys))) for i, step in enumerate(order)]
    return _fold(runs, keys)


def _fold(runs: list[Run], keys: dict[Any, int]) -> list[Run]:
    """Fold until nothing repeats: what was folded may repeat itself, which is the outer loop."""
    while True:
        found = _fold_once(runs, keys)
        if len(found) == len(runs):
            return found
        runs = found


def _fold_once(runs: list[Run], keys: dict[Any, int]) -> list[Run]:
    """At each place the repetition that covers most is taken, of equals the shorter body."""
    found: list[Run] = []
    order = [run.key for run in runs]
    at, size = 0, len(runs)
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
        covered = runs[at : at + best_body * best_count]
        if best_count == 1:
            found.append(covered[0])
        else:
            inner = _fold(covered[:best_body], keys)
            key = keys.setdefault((best_count, *(run.key for run in inner)), len(keys))
            length = sum(run.length for run in covered)
            found.append(Run(covered[0].first, length, key, best_count, inner))
        at += len(covered)
    return found


def short_names(profile: ProfileData) -> list[str]:
    """Names of the steps without the path that all which ran share."""
    parts = [step.name.split("/") for step in profile.steps if step.runs]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    path = "".join(part + "/" for part in parts[0][:shared]) if parts else ""
    return [step.name.removeprefix(path) for step in profile.steps]


def phases(profile: ProfileData) -> list[tuple[str, int, int]]:
    """Stretches of the timeline in one part of the program: (name, first row, end row)."""
    names = [name.split("/")[0] for name in short_names(profile)]
    found: list[tuple[str, int, int]] = []
    for row, step in enumerate(profile.order.tolist()):
        if found and found[-1][0] == names[step]:
            found[-1] = (found[-1][0], found[-1][1], row + 1)
        else:
            found.append((names[step], row, row + 1))
    return found


def alike(profile: ProfileData) -> tuple[list[int], list[str]]:
    """The timeline with steps that differ in a number at the end of their name taken as one.

    A program with two buffers has each step of a loop twice ("pass on 0", "pass on 1"): told
    apart, its loops would hardly repeat.

    Returns:
        For each run of a step a number, and the names of these numbers.
    """
    names = [re.sub(r"(?<=[^/\d])\s*\d+$", "", name) for name in short_names(profile)]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    found = np.array([numbers[name] for name in names], np.int64)
    return found[profile.order].tolist(), list(numbers)


def timeline_data(profile: ProfileData, loops: list[Run]) -> dict[str, Any]:
    """Rows for the script: equal rows are stored once and named by number.

    Keys: `steps` (names), `kinds` ([step, compute, exchange, sync, host]), `order` (one kind a
    run), `phases` and `loops` (first row, end row, and the name or the count; loops inside loops
    follow with their depth, as long as there are not too many to draw).
    """
    rows = np.column_stack([profile.order, profile.rows])
    kinds, order = np.unique(rows, axis=0, return_inverse=True)
    return {
        "steps": short_names(profile),
        "kinds": [[_plain(v) for v in kind] for kind in kinds.tolist()],
        "order": order.ravel().tolist(),
        "phases": [[first, end, name] for name, first, end in phases(profile)],
        "loops": _spans(loops),
    }


def _spans(loops: list[Run]) -> list[list[int]]:
    """Every time a loop ran: [first row, end row, count, depth], from the outside inwards."""
    spans: list[list[int]] = []
    level = [(run, run.first) for run in loops if run.body]
    depth = 0
    while level and depth < _MOST_DEPTH and len(spans) + len(level) <= _MOST_SPANS:
        spans += [[at, at + run.length, run.count, depth] for run, at in level]
        level = [
            (inner, at + turn * (run.length // run.count) + inner.first - run.first)
            for run, at in level
            for inner in run.body
            if inner.body
            for turn in range(run.count)
        ]
        depth += 1
    return spans


def _plain(value: float) -> float | int:
    return int(value) if value.is_integer() else round(value, 3)
