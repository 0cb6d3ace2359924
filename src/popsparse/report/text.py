"""Profiles and comparisons as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dynsparse.checks import check_kind
from dynsparse.typed import typed
from popsparse.report.by_operation import operations
from popsparse.report.comparison import Comparison, Pair, percents
from popsparse.report.data import ProfileData
from popsparse.report.format import number, percent, words
from popsparse.report.memory import peak_step
from popsparse.report.rules import findings
from popsparse.report.timeline import short_names

_WIDTH = 96


@typed
def profile_text(title: str, profiles: Sequence[ProfileData]) -> str:
    """What a page begins with: cycles, memory, operations and three findings of each pass."""
    check_kind("profiles", profiles, (list, tuple), "a list of ProfileData")
    lines = [title]
    for one in profiles:
        lines += ["", *_pass(check_kind("one of profiles", one, ProfileData, "a ProfileData"))]
    return "\n".join(lines)


def _pass(profile: ProfileData) -> list[str]:
    name = words(profile.name).capitalize() or "Run"
    target = profile.target.get("name", "the target")
    lines = [
        f"{name}: {number(profile.cycles)} cycles, {number(profile.seconds * 1e6)} us on {target}, "
        f"{number(profile.target.get('tiles', 0))} tiles"
        if profile.cycles
        else f"{name}: did not run on {target}, {number(profile.target.get('tiles', 0))} tiles"
    ]
    parts = [
        f"{part} {percent(cycles, profile.cycles)}"
        for part, cycles in profile.parts.items()
        if cycles
    ]
    lines += ["  " + ", ".join(parts)] if parts else []
    lines.append(
        f"  fullest tile {profile.worst_tile}: {number(profile.max_bytes)} of "
        f"{number(profile.limit)} bytes ({percent(profile.max_bytes, profile.limit)})"
    )
    peak = peak_step(profile)
    if profile.contents is not None and peak is not None:
        always, other = profile.contents.over_steps([peak])
        lines.append(
            f"  all tiles: {number(float(always[0]))} bytes always live, at most "
            f"{number(float(other[0]))} beside, in {short_names(profile)[peak]}"
        )
    found = operations(profile)
    if found:
        lines.append(f"  {'operation':<34}{'cycles':>12}{'share':>9}{'FLOPs':>16}{'of peak':>10}")
    for one in found:
        flops = number(one.flops) if one.flops else ""
        peak_share = "" if one.peak_share is None else percent(one.peak_share)
        lines.append(
            f"  {one.name[-33:]:<34}{number(one.cycles):>12}"
            f"{percent(one.cycles, profile.cycles):>9}{flops:>16}{peak_share:>10}"
        )
    several = findings(profile)
    for place, finding in enumerate(several[:3], 1):
        text = f"{place}. {finding.title}. {finding.text} {finding.remedy}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="     ")
    if not several:
        lines.append("  No rule finds anything that stands out.")
    return [line.replace("\u00a0", " ").rstrip() for line in lines]


@typed
def comparison_text(found: Comparison) -> str:
    """The figures of both, and what changed from A to B."""
    lines = [f"A: {found.first}", f"B: {found.second}"]
    for names, where in ((found.only_first, "A"), (found.only_second, "B")):
        if names:
            lines.append(f"only in {where}: {', '.join(map(words, names))}")
    for one in found.passes:
        head = words(one.name).capitalize() or "Run"
        lines += ["", f"{head:<36}{'A':>14}{'B':>14}{'change':>10}"]
        lines += [_row(pair) for pair in one.cycles]
        lines += ["Cycles by operation", *(_row(pair) for pair in one.operations)]
        held = [pair for pair in one.memory if pair.first or pair.second]
        lines += ["Bytes of the fullest tile", *(_row(pair) for pair in held)]
        if one.findings:
            lines.append("Findings, % of the cycles or of a tile's memory")
            lines += [_row(pair) for pair in percents(one.findings)]
        for several, what in ((one.gone, "No longer found in B"), (one.came, "New in B")):
            lines.append(f"{what}: {', '.join(f.title.lower() for f in several) or 'nothing'}")
    return "\n".join(line.rstrip() for line in lines)


def _row(pair: Pair) -> str:
    a, b = ("" if value is None else number(value) for value in (pair.first, pair.second))
    change = "" if pair.change is None else f"{100 * pair.change:+.1f} %"
    return f"  {words(pair.name)[-33:]:<34}{a:>14}{b:>14}{change:>10}"
