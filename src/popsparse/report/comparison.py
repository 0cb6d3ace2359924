"""Two profiles compared; profiles as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynsparse.checks import check_kind
from dynsparse.typed import typed
from popsparse.report.charts import esc, number, percent, table, words
from popsparse.report.data import PARTS, ProfileData, StoredProfile, read_profiles
from popsparse.report.rules import Finding, findings
from popsparse.report.steps import operations, peak_step, short_names


@dataclass(frozen=True)
class Pair:
    """A figure of the first profile and of the second; None where one has no such thing."""

    name: str
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """The second over the first, minus 1; None where that says nothing."""
        if self.first is None or self.second is None or not self.first:
            return None
        return self.second / self.first - 1


@dataclass(frozen=True)
class ComparedPass:
    """One pass in both.

    Attributes:
        name: of the pass.
        cycles: all of them, then those of compute, exchange, sync and host.
        operations: cycles of each, as of `operations`.
        memory: bytes of the fullest tile, then by category.
        findings: the share of each that either has, 0 to 1, by title.
        gone, came: findings of the first that the second does not have, and the reverse.
    """

    name: str
    cycles: list[Pair]
    operations: list[Pair]
    memory: list[Pair]
    findings: list[Pair]
    gone: list[Finding]
    came: list[Finding]


@dataclass(frozen=True)
class Comparison:
    """What `compare` finds.

    Attributes:
        first, second: titles, of files with their names.
        passes: those that both have.
        only_first, only_second: names of the others.
    """

    first: str
    second: str
    passes: list[ComparedPass]
    only_first: list[str]
    only_second: list[str]


def compare(first: Any, second: Any) -> Comparison:
    """Put two profiles side by side.

    Args:
        first, second: each a `StoredProfile`, or what `read_profiles` takes. Passes are matched by
            name; where either has one pass only, these are compared whatever their names.

    Raises:
        TypeError, ValueError: something else.
    """
    (name_a, a), (name_b, b) = _read(first, "first"), _read(second, "second")
    if len(a) == len(b) == 1:
        pairs = [(*a.values(), *b.values())]
    else:
        pairs = [(a[name], b[name]) for name in a if name in b]
    met = {one.name for pair in pairs for one in pair}
    return Comparison(
        name_a,
        name_b,
        [_pass(x, y) for x, y in pairs],
        [name for name in a if name not in met],
        [name for name in b if name not in met],
    )


def _read(given: Any, name: str) -> tuple[str, dict[str, ProfileData]]:
    if isinstance(given, StoredProfile):
        return f"{given.title}, {given.file.name}", {one.name: one for one in given.profiles}
    try:
        found = read_profiles(given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not found:
        raise ValueError(f"{name} must be a profile, got nothing")
    return f"the {name}", {one.name: one for one in found}


def _pass(a: ProfileData, b: ProfileData) -> ComparedPass:
    total = Pair("all cycles", a.cycles, b.cycles)
    parts = _pairs(a.parts, b.parts, PARTS)
    spent_a, spent_b = ({one.name: one.cycles for one in operations(profile)} for profile in (a, b))
    fullest = Pair("fullest tile", a.max_bytes, b.max_bytes)
    of_a, of_b = findings(a), findings(b)
    shares_a, shares_b = ({one.title: one.share for one in many} for many in (of_a, of_b))
    rules_a, rules_b = ({one.rule for one in several} for several in (of_a, of_b))
    return ComparedPass(
        a.name or b.name,
        [total, *(pair for pair in parts if pair.first or pair.second)],
        _pairs(spent_a, spent_b),
        [fullest, *_pairs(a.worst, b.worst)],
        _pairs(shares_a, shares_b),
        [one for one in of_a if one.rule not in rules_b],
        [one for one in of_b if one.rule not in rules_a],
    )


def _pairs(a: Mapping[str, float], b: Mapping[str, float], names: Sequence[str] = ()) -> list[Pair]:
    """Those of the first in its order, then what only the second has."""
    return [Pair(n, a.get(n), b.get(n)) for n in names or [*a, *(k for k in b if k not in a)]]


def comparison_section(found: Comparison) -> str:
    """Tables of every pass."""
    out = [f"<p>A: {esc(found.first)}. B: {esc(found.second)}. Changes are those from A to B.</p>"]
    for name, where in ((found.only_first, "A"), (found.only_second, "B")):
        if name:
            out.append(f"<p>Only in {where}: {esc(', '.join(map(words, name)))}.</p>")
    for one in found.passes:
        if one.name:
            out.append(f'<h3 class="pass">{esc(words(one.name)).capitalize()}</h3>')
        out.append('<div class="pair">')
        for heading, pairs in (
            ("Cycles", one.cycles),
            ("Cycles by operation", one.operations),
            ("Memory of the fullest tile, bytes", one.memory),
            ("Findings, % of the cycles or of a tile's memory", percents(one.findings)),
        ):
            rows = [_row(pair) for pair in pairs if pair.first or pair.second]
            head = ["", "#A", "#B", "#difference", "#change"]
            out.append(f"<div><h3>{heading}</h3>{table(head, rows, 'narrow')}</div>")
        out.append("</div>")
        for several, what in ((one.gone, "No longer found in B"), (one.came, "New in B")):
            titles = ", ".join(esc(f.title.lower()) for f in several)
            out.append(f"<p><b>{what}:</b> {titles or 'nothing'}.</p>")
    return "".join(out)


def percents(pairs: Sequence[Pair]) -> list[Pair]:
    """Shares as percentages, to one digit."""
    return [
        Pair(p.name, *(None if v is None else round(100 * v, 1) for v in (p.first, p.second)))
        for p in pairs
    ]


def _row(pair: Pair) -> tuple[str, list[Any]]:
    difference = round((pair.second or 0) - (pair.first or 0), 6)
    cells = [esc(words(pair.name)), pair.first, pair.second, "", ""]
    if not difference:
        return "", cells
    cells[3] = f"{'+' if difference > 0 else ''}{number(difference)}"
    cells[4] = "" if pair.change is None else f"{100 * pair.change:+.1f}\u00a0%"
    return "up" if difference > 0 else "down", cells


_WIDTH = 96


@typed
def profile_text(title: str, profiles: Sequence[ProfileData]) -> str:
    """What a page begins with: cycles, memory, operations and three findings of each pass."""
    check_kind("profiles", profiles, (list, tuple), "a list of ProfileData")
    lines = [title]
    for one in profiles:
        lines += ["", *_pass_text(check_kind("one of profiles", one, ProfileData, "a ProfileData"))]
    return "\n".join(lines)


def _pass_text(profile: ProfileData) -> list[str]:
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
        lines += [_text_row(pair) for pair in one.cycles]
        lines += ["Cycles by operation", *(_text_row(pair) for pair in one.operations)]
        held = [pair for pair in one.memory if pair.first or pair.second]
        lines += ["Bytes of the fullest tile", *(_text_row(pair) for pair in held)]
        if one.findings:
            lines.append("Findings, % of the cycles or of a tile's memory")
            lines += [_text_row(pair) for pair in percents(one.findings)]
        for several, what in ((one.gone, "No longer found in B"), (one.came, "New in B")):
            lines.append(f"{what}: {', '.join(f.title.lower() for f in several) or 'nothing'}")
    return "\n".join(line.rstrip() for line in lines)


def _text_row(pair: Pair) -> str:
    a, b = ("" if value is None else number(value) for value in (pair.first, pair.second))
    change = "" if pair.change is None else f"{100 * pair.change:+.1f} %"
    return f"  {words(pair.name)[-33:]:<34}{a:>14}{b:>14}{change:>10}"
