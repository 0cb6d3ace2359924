"""Two profiles compared; profiles as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynsparse._core.checks import check_kind, typed
from popsparse.report.charts import esc, number, percent, table, words
from popsparse.report.data import PARTS, ProfileData, StoredProfile, read_profiles
from popsparse.report.rules import Finding, findings
from popsparse.report.steps import operations, peak_step, short_names


@dataclass(frozen=True)
class Pair:
    """A figure of the first profile and of the second; None where a profile lacks it."""

    name: str
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """The second over the first, minus 1; None without both, or where the first is 0."""
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
    matched = {profile.name for pair in pairs for profile in pair}
    return Comparison(
        name_a,
        name_b,
        [_pass(x, y) for x, y in pairs],
        [name for name in a if name not in matched],
        [name for name in b if name not in matched],
    )


def _read(value: Any, name: str) -> tuple[str, dict[str, ProfileData]]:
    if isinstance(value, StoredProfile):
        return f"{value.title}, {value.file.name}", {run.name: run for run in value.profiles}
    try:
        profiles = read_profiles(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not profiles:
        raise ValueError(f"{name} must be a profile, got nothing")
    return f"the {name}", {profile.name: profile for profile in profiles}


def _pass(a: ProfileData, b: ProfileData) -> ComparedPass:
    total = Pair("all cycles", a.cycles, b.cycles)
    parts = _pairs(a.parts, b.parts, PARTS)
    spent_a, spent_b = ({op.name: op.cycles for op in operations(profile)} for profile in (a, b))
    fullest = Pair("fullest tile", a.max_bytes, b.max_bytes)
    of_a, of_b = findings(a), findings(b)
    shares_a, shares_b = (
        {finding.title: finding.share for finding in several} for several in (of_a, of_b)
    )
    rules_a, rules_b = ({finding.rule for finding in several} for several in (of_a, of_b))
    return ComparedPass(
        a.name or b.name,
        [total, *(pair for pair in parts if pair.first or pair.second)],
        _pairs(spent_a, spent_b),
        [fullest, *_pairs(a.worst, b.worst)],
        _pairs(shares_a, shares_b),
        [finding for finding in of_a if finding.rule not in rules_b],
        [finding for finding in of_b if finding.rule not in rules_a],
    )


def _pairs(a: Mapping[str, float], b: Mapping[str, float], names: Sequence[str] = ()) -> list[Pair]:
    """Those of the first in its order, then what only the second has."""
    return [Pair(n, a.get(n), b.get(n)) for n in names or [*a, *(k for k in b if k not in a)]]


def render_comparison(comparison: Comparison) -> str:
    """Tables of every pass."""
    titles = f"A: {esc(comparison.first)}. B: {esc(comparison.second)}."
    out = [f"<p>{titles} Changes are those from A to B.</p>"]
    for name, where in ((comparison.only_first, "A"), (comparison.only_second, "B")):
        if name:
            out.append(f"<p>Only in {where}: {esc(', '.join(map(words, name)))}.</p>")
    for compared in comparison.passes:
        if compared.name:
            out.append(f'<h3 class="pass">{esc(words(compared.name)).capitalize()}</h3>')
        out.append('<div class="pair">')
        for heading, pairs in (
            ("Cycles", compared.cycles),
            ("Cycles by operation", compared.operations),
            ("Memory of the fullest tile, bytes", compared.memory),
            ("Findings, % of the cycles or of a tile's memory", _to_percent(compared.findings)),
        ):
            rows = [_row(pair) for pair in pairs if pair.first or pair.second]
            head = ["", "#A", "#B", "#difference", "#change"]
            out.append(f"<div><h3>{heading}</h3>{table(head, rows, 'narrow')}</div>")
        out.append("</div>")
        for several, what in ((compared.gone, "No longer found in B"), (compared.came, "New in B")):
            titles = ", ".join(esc(f.title.lower()) for f in several)
            out.append(f"<p><b>{what}:</b> {titles or 'nothing'}.</p>")
    return "".join(out)


def _to_percent(pairs: Sequence[Pair]) -> list[Pair]:
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
    """Text with cycles, memory, operations and three findings of each pass."""
    check_kind("profiles", profiles, (list, tuple), "a list of ProfileData")
    lines = [title]
    for profile in profiles:
        lines += [
            "",
            *_pass_text(check_kind("one of profiles", profile, ProfileData, "a ProfileData")),
        ]
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
    entries = operations(profile)
    if entries:
        lines.append(f"  {'operation':<34}{'cycles':>12}{'share':>9}{'FLOPs':>16}{'of peak':>10}")
    for operation in entries:
        flops = number(operation.flops) if operation.flops else ""
        peak_share = "" if operation.peak_share is None else percent(operation.peak_share)
        lines.append(
            f"  {operation.name[-33:]:<34}{number(operation.cycles):>12}"
            f"{percent(operation.cycles, profile.cycles):>9}{flops:>16}{peak_share:>10}"
        )
    ranked = findings(profile)
    for place, finding in enumerate(ranked[:3], 1):
        text = f"{place}. {finding.title}. {finding.text} {finding.remedy}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="     ")
    if not ranked:
        lines.append("  No rule finds anything that stands out.")
    return [line.replace("\u00a0", " ").rstrip() for line in lines]


@typed
def comparison_text(comparison: Comparison) -> str:
    """The figures of both, and what changed from A to B."""
    lines = [f"A: {comparison.first}", f"B: {comparison.second}"]
    for names, where in ((comparison.only_first, "A"), (comparison.only_second, "B")):
        if names:
            lines.append(f"only in {where}: {', '.join(map(words, names))}")
    for compared in comparison.passes:
        head = words(compared.name).capitalize() or "Run"
        lines += ["", f"{head:<36}{'A':>14}{'B':>14}{'change':>10}"]
        lines += [_text_row(pair) for pair in compared.cycles]
        lines += ["Cycles by operation", *(_text_row(pair) for pair in compared.operations)]
        used = [pair for pair in compared.memory if pair.first or pair.second]
        lines += ["Bytes of the fullest tile", *(_text_row(pair) for pair in used)]
        if compared.findings:
            lines.append("Findings, % of the cycles or of a tile's memory")
            lines += [_text_row(pair) for pair in _to_percent(compared.findings)]
        for several, what in ((compared.gone, "No longer found in B"), (compared.came, "New in B")):
            lines.append(f"{what}: {', '.join(f.title.lower() for f in several) or 'nothing'}")
    return "\n".join(line.rstrip() for line in lines)


def _text_row(pair: Pair) -> str:
    a, b = ("" if value is None else number(value) for value in (pair.first, pair.second))
    change = "" if pair.change is None else f"{100 * pair.change:+.1f} %"
    return f"  {words(pair.name)[-33:]:<34}{a:>14}{b:>14}{change:>10}"
