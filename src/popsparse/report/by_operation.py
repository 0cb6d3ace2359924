"""What a program's operations cost: its steps by the names that whoever built it gave them."""

from __future__ import annotations

from dataclasses import dataclass

from dynsparse.checks import check_integer
from dynsparse.typed import typed
from popsparse.report.data import ProfileData, StepData
from popsparse.report.format import bar, cell, number, percent, say, table
from popsparse.report.timeline import short_names

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


def operations_section(profile: ProfileData) -> str:
    """Operations and those inside them, to the third part of their names."""
    found = operations(profile, 3)
    rows = []
    several = {one.name.rpartition("/")[0] for one in found}
    for one in found[:_MOST]:
        label = one.name.rpartition("/")[2]
        indent = f'<span style="padding-left:{1.4 * (one.depth - 1):g}em">{say(label)}</span>'
        rate = one.flops / one.seconds / 1e12 if one.flops and one.seconds else None
        content = (
            cell(indent)
            + cell(number(one.cycles), "n")
            + cell(percent(one.cycles, profile.cycles), "n")
            + cell(bar([("compute", one.cycles)], profile.cycles), "b")
            + cell(number(one.flops) if one.flops else "", "n")
            + cell(number(rate) if rate else "", "n")
            + cell(number(one.tiles) if one.tiles else "", "n")
            + cell("" if one.peak_share is None else percent(one.peak_share), "n")
        )
        rows.append(f'<tr class="loop">{content}</tr>' if one.name in several else content)
    head = [
        ("operation", ""),
        ("cycles", "n"),
        ("share", "n"),
        ("", "b"),
        ("FLOPs", "n"),
        ("TFLOP/s", "n"),
        ("tiles", "n"),
        ("of their peak", "n"),
    ]
    more = f"<p>and {len(found) - _MOST:,} more.</p>" if len(found) > _MOST else ""
    return (
        "<p>Steps by the names they were built with. Cycles are those of synchronisation, exchange "
        "and compute; the peak is that of the matrix units of the tiles that compute, in all these "
        "cycles.</p>" + table(head, rows) + more
    )
