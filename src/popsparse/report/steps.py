"""Cycles and memory of a profile by step and by operation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynsparse._core.checks import check_integer, typed
from popsparse.machine import ProgramNode
from popsparse.report.charts import bar, esc, indent, legend, number, percent, table
from popsparse.report.data import ContentsData, ProfileData, StepData

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
        folded = _fold_once(runs, keys)
        if len(folded) == len(runs):
            return folded
        runs = folded


def _fold_once(runs: list[Run], keys: dict[Any, int]) -> list[Run]:
    """At each place the repetition that covers most is taken, of equals the shorter body."""
    folded: list[Run] = []
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
            folded.append(covered[0])
        else:
            inner = _fold(covered[:best_body], keys)
            key = keys.setdefault((best_count, *(run.key for run in inner)), len(keys))
            length = sum(run.length for run in covered)
            folded.append(Run(covered[0].first, length, key, best_count, inner))
        at += len(covered)
    return folded


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
    spans: list[tuple[str, int, int]] = []
    for row, step in enumerate(profile.order.tolist()):
        if spans and spans[-1][0] == names[step]:
            spans[-1] = (spans[-1][0], spans[-1][1], row + 1)
        else:
            spans.append((names[step], row, row + 1))
    return spans


def merge_numbered_steps(profile: ProfileData) -> tuple[list[int], list[str]]:
    """The timeline with steps that differ in a number at the end of their name taken as one.

    A program with two buffers has each step of a loop twice ("pass on 0", "pass on 1"): told
    apart, its loops would hardly repeat.

    Returns:
        For each run of a step a number, and the names of these numbers.
    """
    names = [re.sub(r"(?<=[^/\d])\s*\d+$", "", name) for name in short_names(profile)]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    number_of = np.array([numbers[name] for name in names], np.int64)
    return number_of[profile.order].tolist(), list(numbers)


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


_MOST = 120


@dataclass(frozen=True)
class Operation:
    """Steps whose paths begin alike.

    Attributes:
        name: the beginning, without what all steps of the program share.
        depth: how many parts it has, 1 or more.
        steps: of the program; runs: of all of them.
        cycles: with exchange and synchronisation.
        flops: floating-point operations, a multiply-accumulate as two.
        tiles: the most that compute in one of its steps.
        seconds: of its cycles.
        peak_share: its flops over what the matrix units of these tiles could do in its cycles, on
            operands of their type; None where nothing says what it does.
    """

    name: str
    depth: int
    steps: int
    runs: int
    cycles: float
    flops: float
    tiles: int
    seconds: float
    peak_share: float | None


@typed
def operations(profile: ProfileData, depth: int = 1) -> list[Operation]:
    """The operations of a run, in the order of the program.

    Args:
        depth: parts of the path that make a name: with 2 the operations of 1 come too, each before
            those inside it.

    Raises:
        ValueError: a depth below 1.
    """
    depth = check_integer("depth", depth, 1)
    names = short_names(profile)
    groups: dict[str, list[StepData]] = {}
    for name, step in zip(names, profile.steps, strict=True):
        if step.runs:
            path = name.split("/")
            for size in range(1, min(depth, len(path)) + 1):
                groups.setdefault("/".join(path[:size]), []).append(step)
    clock = profile.target.get("clock_hz") or 0.0
    return [_operation(name, steps, float(clock)) for name, steps in groups.items()]


def _operation(name: str, steps: list[StepData], clock: float) -> Operation:
    cycles = sum(step.cycles for step in steps)
    flops = sum(step.flops for step in steps)
    tiles = max(step.tiles for step in steps)
    # Steps that say nothing of what they do count with their time alone.
    peak = max((step.peak_flops for step in steps if step.flops), default=0.0)
    could = cycles * tiles * peak
    return Operation(
        name,
        name.count("/") + 1,
        len(steps),
        sum(step.runs for step in steps),
        cycles,
        flops,
        tiles,
        cycles / clock if clock else 0.0,
        flops / could if could else None,
    )


def render_operations(profile: ProfileData) -> str:
    """Operations and those inside them, to the third part of their names."""
    entries = operations(profile, 3)
    rows = []
    several = {operation.name.rpartition("/")[0] for operation in entries}
    for operation in entries[:_MOST]:
        rate = (
            operation.flops / operation.seconds / 1e12
            if operation.flops and operation.seconds
            else None
        )
        cells = [
            indent(esc(operation.name.rpartition("/")[2]), operation.depth - 1),
            operation.cycles,
            percent(operation.cycles, profile.cycles),
            bar([("compute", operation.cycles)], profile.cycles),
            operation.flops or None,
            rate,
            operation.tiles or None,
            None if operation.peak_share is None else percent(operation.peak_share),
        ]
        rows.append(("loop" if operation.name in several else "", cells))
    head = ["operation", "#cycles", "#share", "=", "#FLOPs", "#TFLOP/s", "#tiles", "#of their peak"]
    more = f"<p>and {len(entries) - _MOST:,} more.</p>" if len(entries) > _MOST else ""
    return (
        "<p>Steps by the names they were built with. Cycles are those of synchronisation, exchange "
        "and compute; the peak is that of the matrix units of the tiles that compute, in all these "
        "cycles.</p>" + table(head, rows) + more
    )


_MOST_VARIABLES = 1500
"""Variables in a page; the smallest of more are taken together."""
_MOST_VERTICES = 3000
"""Codelets of steps in a page."""
_KINDS = ("constant", "always live", "not always live")


def _steps_of(program: list[ProgramNode]) -> list[int]:
    """The steps of a program in its order, those of branches that were not taken included."""
    order: dict[int, None] = {}
    seen: set[int] = set()
    waiting = [0] if program else []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        current = program[node]
        if current.step is not None:
            order[current.step] = None
        waiting += [child for _, child, _ in reversed(current.parts)]
    return list(order)


@typed
def memory_steps(profile: ProfileData) -> list[int]:
    """The steps that hold memory, in the order of the program; of all programs if none ran."""
    if profile.contents is None:
        return []
    live = profile.contents.live
    order = _steps_of(profile.program) if profile.program else sorted(live)
    return [step for step in order if step in live]


@typed
def peak_step(profile: ProfileData, tile: int | None = None) -> int | None:
    """The step at which most is live, on a tile or on all together; None without contents."""
    steps = memory_steps(profile)
    if not steps or profile.contents is None:
        return None
    return steps[int(profile.contents.over_steps(steps, tile)[1].argmax())]


def contents_data(contents: ContentsData) -> dict[str, Any]:
    """Variables and vertices for the script: [name, type, kind, calls, stretches flat]."""
    largest, _ = _kept(contents)
    rows = [
        [v.name, v.dtype, _KINDS.index(v.kind), ", from ".join(v.made_by), _flatten(v.on)]
        for v in (contents.variables[i] for i in largest)
    ]
    return {
        "variables": rows,
        "vertices": [
            [vertices.step, vertices.codelet, _flatten(vertices.on)]
            for vertices in contents.vertices[:_MOST_VERTICES]
        ],
    }


def _kept(contents: ContentsData) -> tuple[list[int], dict[int, int]]:
    """The largest variables, and their numbers among them."""
    order = np.argsort([-v.bytes for v in contents.variables], kind="stable")
    largest = sorted(order[:_MOST_VARIABLES].tolist())
    return largest, {old: new for new, old in enumerate(largest)}


def _flatten(stretches: list[tuple[int, int, int]]) -> list[int]:
    return [value for stretch in stretches for value in stretch]


def live_data(profile: ProfileData, contents_of: str) -> dict[str, Any]:
    """The steps for the script: names, what each holds beside the variables that always live, and
    at which pages begin: the peak, on the fullest tile.

    Args:
        contents_of: under which key `contents_data` is.
    """
    assert profile.contents is not None
    steps = memory_steps(profile)
    _, number_of = _kept(profile.contents)
    peak = peak_step(profile, profile.worst_tile)
    names = short_names(profile)
    # From step to step little changes, however much is live.
    changes, before = [], set[int]()
    for step in steps:
        now = {number_of[i] for i in profile.contents.live[step] if i in number_of}
        changes.append([sorted(now - before), sorted(before - now)])
        before = now
    return {
        "contents": contents_of,
        "steps": steps,
        "names": {step: names[step] for step in range(len(names))},
        "changes": changes,
        "runs": [profile.steps[s].runs for s in steps],
        "tile": profile.worst_tile,
        "at": steps.index(peak) if peak is not None else 0,
        "limit": profile.limit,
    }


def render_live_memory(profile: ProfileData, identity: str) -> str:
    """The frame of the charts and of the table of a chosen step."""
    contents = profile.contents
    peak = peak_step(profile)
    if contents is None or peak is None:
        return ""
    always, other = contents.over_steps([peak])
    left = len(contents.variables) - _MOST_VARIABLES
    few = f" The {left:,} smallest variables are left out here." if left > 0 else ""
    return (
        f"<p>On all tiles together {number(float(always[0]))} B are always live; what is not "
        f"reaches {number(float(other[0]))} B, in {esc(short_names(profile)[peak])}. Variables "
        "that are never live together may share memory. Click on a step to see what it holds, and "
        f"on a tile below to see its curve.{few}</p>"
        f'<div class="live" data-source="{esc(identity)}"><div class="charts"></div>'
        + legend([("c0", "always live"), ("c2", "not always live"), ("pick", "the step chosen")])
        + '<div class="held"></div></div>'
        "<noscript><p>These charts need JavaScript; Python has the same figures.</p></noscript>"
    )
