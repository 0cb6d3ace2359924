"""Cycles and memory of a profile by step and by operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynsparse._core.checks import check_integer, check_types
from popsparse.machine import Contents, Profile, ProgramNode, StepProfile, Target
from popsparse.machine.profile import PARTS
from popsparse.report.charts import bar, esc, indent, legend, number, percent, table


def short_names(profile: Profile) -> list[str]:
    """Names of the steps without the path shared by all steps that ran."""
    parts = [step.name.split("/") for step in profile.steps if step.runs]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    path = "".join(part + "/" for part in parts[0][:shared]) if parts else ""
    return [step.name.removeprefix(path) for step in profile.steps]


def phases(profile: Profile) -> list[tuple[str, int, int]]:
    """Ranges of the timeline in one part of the program: (name, first row, end row)."""
    names = [name.split("/")[0] for name in short_names(profile)]
    spans: list[tuple[str, int, int]] = []
    for row, (step, *_) in enumerate(profile.timeline):
        if spans and spans[-1][0] == names[step]:
            spans[-1] = (spans[-1][0], spans[-1][1], row + 1)
        else:
            spans.append((names[step], row, row + 1))
    return spans


def timeline_data(profile: Profile) -> dict[str, Any]:
    """Rows for the script: equal rows are stored once and referenced by number.

    Keys: `steps` (names), `kinds` ([step, compute, exchange, sync, host]), `order` (one kind per
    run), `phases` (first row, end row and the name).
    """
    rows = np.array(
        [[row.step, *(getattr(row, part) for part in PARTS)] for row in profile.timeline], float
    )
    kinds, order = np.unique(rows, axis=0, return_inverse=True)
    return {
        "steps": short_names(profile),
        "kinds": [[_plain(v) for v in kind] for kind in kinds.tolist()],
        "order": order.ravel().tolist(),
        "phases": [[first, end, name] for name, first, end in phases(profile)],
    }


def _plain(value: float) -> float | int:
    return int(value) if value.is_integer() else round(value, 3)


@dataclass(frozen=True)
class Operation:
    """Steps whose paths share a prefix.

    Attributes:
        name: the prefix, without the part that all steps of the program share.
        depth: number of parts of the prefix, 1 or more.
        steps: number of its steps; runs: their number of runs.
        parts: cycles by part: compute, exchange, sync, host.
        flops: floating-point operations, a multiply-accumulate as two.
        tiles: the most tiles that compute in one of its steps.
        received: bytes on the exchange.
        seconds: time of its cycles.
        balance: for a single step the mean compute of all tiles over that of the busiest one; None
            for several steps, or without compute.
        peak_share: its flops over what the matrix units of these tiles could do in its cycles, on
            operands of their type; None if the steps declare no flops.
    """

    name: str
    depth: int
    steps: int
    runs: int
    parts: dict[str, float]
    flops: float
    tiles: int
    received: int
    seconds: float
    balance: float | None
    peak_share: float | None

    @property
    def cycles(self) -> float:
        """Total cycles, with exchange and synchronisation."""
        return sum(self.parts.values())


@check_types
def operations(profile: Profile, depth: int = 1) -> list[Operation]:
    """The operations of a run, in the order of the program.

    Args:
        depth: number of parts of the path in a name: 2 also includes the operations of 1, each
            before those inside it.

    Raises:
        ValueError: a depth below 1.
    """
    depth = check_integer("depth", depth, 1)
    groups: dict[str, list[StepProfile]] = {}
    for name, step in zip(short_names(profile), profile.steps, strict=True):
        if step.runs:
            path = name.split("/")
            for size in range(1, min(depth, len(path)) + 1):
                groups.setdefault("/".join(path[:size]), []).append(step)
    return [_operation(name, steps, profile.target) for name, steps in groups.items()]


def _operation(name: str, steps: list[StepProfile], target: Target) -> Operation:
    parts = {part: sum(getattr(step, part) for step in steps) for part in PARTS}
    cycles, flops = sum(parts.values()), sum(step.flops for step in steps)
    tiles = max(step.tiles for step in steps)
    # Steps that declare no flops count only with their time.
    peak = max((step.peak_flops for step in steps if step.flops), default=0.0)
    could = cycles * tiles * peak
    return Operation(
        name,
        name.count("/") + 1,
        len(steps),
        sum(step.runs for step in steps),
        parts,
        flops,
        tiles,
        sum(step.received for step in steps),
        target.seconds(cycles),
        steps[0].balance if len(steps) == 1 and tiles else None,
        flops / could if could else None,
    )


def render_parts_legend(profile: Profile) -> str:
    """The colours of the parts that cost the run anything."""
    return legend((part, part) for part in PARTS if profile.parts[part])


_MOST, _DEEPEST = 120, 6  # operations in a page, and parts of their names


def render_operations(profile: Profile) -> str:
    """Operations, those inside them, and the steps."""
    entries = operations(profile, _DEEPEST)
    rows = []
    several = {operation.name.rpartition("/")[0] for operation in entries}
    for entry in entries[:_MOST]:
        rate = entry.flops / entry.seconds / 1e12 if entry.flops and entry.seconds else None
        shares = [None if s is None else percent(s) for s in (entry.peak_share, entry.balance)]
        cells = [
            indent(esc(entry.name.rpartition("/")[2]), entry.depth - 1),
            entry.runs,
            entry.cycles,
            percent(entry.cycles, profile.cycles),
            bar(entry.parts.items(), profile.cycles),
            *(entry.parts[part] or None for part in PARTS[:3]),
            entry.received or None,
            entry.flops or None,
            rate,
            entry.tiles or None,
            *shares,
        ]
        rows.append(("loop" if entry.name in several else "", cells))
    head: list[Any] = [
        ("operation", "w"),
        "#runs",
        "#cycles",
        "#share",
        "=",
        *(f"#{part}" for part in PARTS[:3]),
    ]
    head += ["#received, B", "#FLOPs", "#TFLOP/s", "#tiles", "#of peak", "#balance"]
    more = f"<p>and {len(entries) - _MOST:,} more.</p>" if len(entries) > _MOST else ""
    codelets = sorted(profile.codelets.items(), key=lambda item: -item[1].cycles)[:20]
    by_codelet = table(
        ["codelet", "#vertices run", "#cycles, sum over vertices"],
        ([esc(name), entry.vertices, entry.cycles] for name, entry in codelets),
    )
    return (
        "<p>Steps by the names they were built with. Cycles are those of synchronisation, exchange "
        "and compute; the peak is that of the matrix units of the tiles that compute, in all these "
        "cycles; a balance of 100 % means that all tiles had as much to do.</p>"
        + table(head, rows, "wide")
        + more
        + render_parts_legend(profile)
        + f"<details><summary>Vertices by codelet</summary>{by_codelet}</details>"
    )


_MOST_VARIABLES = 1500
"""Most variables in a page, the largest ones."""
_MOST_VERTICES = 3000
"""Most codelets of steps in a page."""
_KINDS = ("constant", "always live", "not always live")


def _steps_of(program: list[ProgramNode]) -> list[int]:
    """The steps of a program in its order, including branches that were not taken."""
    order: dict[int, None] = {}
    seen: set[int] = set()
    waiting = [0]
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


@check_types
def memory_steps(profile: Profile) -> list[int]:
    """The steps that hold memory, in the order of the program; of all programs if none ran."""
    live, tree = profile.contents.live, profile.tree()
    order = _steps_of(tree) if tree else sorted(live)
    return [step for step in order if step in live]


@check_types
def peak_step(profile: Profile, tile: int | None = None) -> int | None:
    """The step with the most live bytes, on a tile or on all together; None if there is none."""
    steps = memory_steps(profile)
    if not steps:
        return None
    return steps[int(profile.contents.over_steps(steps, tile)[1].argmax())]


def contents_data(contents: Contents) -> dict[str, Any]:
    """Variables and vertices for the script: [name, type, kind, calls, stretches flat]."""
    largest, _ = _largest_variables(contents)
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


def _largest_variables(contents: Contents) -> tuple[list[int], dict[int, int]]:
    """The largest variables, and their numbers among them."""
    order = np.argsort([-v.bytes for v in contents.variables], kind="stable")
    largest = sorted(order[:_MOST_VARIABLES].tolist())
    return largest, {old: new for new, old in enumerate(largest)}


def _flatten(stretches: list[tuple[int, int, int]]) -> list[int]:
    return [value for stretch in stretches for value in stretch]


def live_data(profile: Profile, contents_of: str) -> dict[str, Any]:
    """The steps for the script: names, the variables of each that are not always live, and the
    step shown first: the peak, on the fullest tile.

    Args:
        contents_of: the key of `contents_data`.
    """
    steps = memory_steps(profile)
    _, number_of = _largest_variables(profile.contents)
    tile = profile.memory.worst_tile
    peak = peak_step(profile, tile)
    # Little changes from step to step, so only changes are stored.
    changes, before = [], set[int]()
    for step in steps:
        now = {number_of[i] for i in profile.contents.live[step] if i in number_of}
        changes.append([sorted(now - before), sorted(before - now)])
        before = now
    return {
        "contents": contents_of,
        "steps": steps,
        "names": short_names(profile),
        "changes": changes,
        "runs": [profile.steps[s].runs for s in steps],
        "tile": tile,
        "at": steps.index(peak) if peak is not None else 0,
        "limit": profile.memory.limit,
    }


def render_live_memory(profile: Profile, identity: str) -> str:
    """The frame of the charts and of the table of a chosen step."""
    contents = profile.contents
    peak = peak_step(profile)
    if peak is None:
        return ""
    always, other = contents.over_steps([peak])
    left = len(contents.variables) - _MOST_VARIABLES
    few = f" The {left:,} smallest variables are left out here." if left > 0 else ""
    return (
        f"<p>A variable is live while its contents are still needed. On all tiles together "
        f"{number(float(always[0]))} B are live in every step; the others reach "
        f"{number(float(other[0]))} B, in {esc(short_names(profile)[peak])}. Variables that are "
        "never live together may share memory. Click on a step to see what it holds, and "
        f"on a tile below to see its curve.{few}</p>"
        f'<div class="live" data-source="{esc(identity)}"><div class="charts"></div>'
        + legend([("c0", "always live"), ("c2", "not always live"), ("pick", "the step chosen")])
        + '<div class="held"></div></div>'
        "<noscript><p>These charts need JavaScript; Python has the same figures.</p></noscript>"
    )
