"""Two profiles compared; profiles as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynsparse._core.checks import check_kind, check_types
from popsparse.machine import Profile
from popsparse.report.charts import esc, number, table, words
from popsparse.report.data import StoredProfile, read_profiles
from popsparse.report.rules import Finding, findings
from popsparse.report.steps import operations


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
    """One pass in both profiles.

    Attributes:
        name: name of the pass.
        cycles: total cycles, then those of compute, exchange, sync and host.
        operations: cycles of each operation, as in `operations`.
        memory: bytes of the fullest tile, then by category.
        findings: the share, 0 to 1, of each finding that either has, by title.
        gone, came: findings only in the first profile, and only in the second.
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
    """The result of `compare`.

    Attributes:
        first, second: titles, for files with their names.
        passes: the passes that both profiles have.
        only_first, only_second: names of the other passes.
    """

    first: str
    second: str
    passes: list[ComparedPass]
    only_first: list[str]
    only_second: list[str]


def compare(first: Any, second: Any) -> Comparison:
    """Compare two profiles.

    Args:
        first, second: each a `StoredProfile`, or an argument of `read_profiles`. Passes are matched
            by name; if each has only one pass, names are ignored.

    Raises:
        TypeError, ValueError: invalid profiles.
    """
    (name_a, a), (name_b, b) = _read(first, "first"), _read(second, "second")
    if len(a) == len(b) == 1:
        pairs = [(*a.values(), *b.values())]
    else:
        pairs = [(a[name], b[name]) for name in a if name in b]
    matched = {profile.name for pair in pairs for profile in pair}
    only = [[name for name in runs if name not in matched] for runs in (a, b)]
    return Comparison(name_a, name_b, [_pass(x, y) for x, y in pairs], *only)


def _read(value: Any, name: str) -> tuple[str, dict[str, Profile]]:
    if isinstance(value, StoredProfile):
        return f"{value.title}, {value.file.name}", {run.name: run for run in value.profiles}
    try:
        profiles = read_profiles(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None
    if not profiles:
        raise ValueError(f"{name} must be a profile, got nothing")
    return f"the {name}", {profile.name: profile for profile in profiles}


def _pass(a: Profile, b: Profile) -> ComparedPass:
    cycles = _pairs({"all cycles": a.cycles, **a.parts}, {"all cycles": b.cycles, **b.parts})
    spent_a, spent_b = ({op.name: op.cycles for op in operations(run)} for run in (a, b))
    of_a, of_b = findings(a), findings(b)
    shares_a, shares_b = ({item.title: item.share for item in several} for several in (of_a, of_b))
    rules_a, rules_b = ({item.rule for item in several} for several in (of_a, of_b))
    return ComparedPass(
        a.name or b.name,
        [pair for pair in cycles if pair.first or pair.second],
        _pairs(spent_a, spent_b),
        _pairs(_memory(a), _memory(b)),
        _pairs(shares_a, shares_b),
        [finding for finding in of_a if finding.rule not in rules_b],
        [finding for finding in of_b if finding.rule not in rules_a],
    )


def _memory(profile: Profile) -> dict[str, float]:
    """Bytes of the fullest tile, and by category."""
    use = profile.memory
    categories = {name: float(sizes[use.worst_tile]) for name, sizes in use.by_category.items()}
    return {"fullest tile": use.max_tile_bytes, **categories}


def _pairs(a: Mapping[str, float], b: Mapping[str, float]) -> list[Pair]:
    """The pairs of the first in its order, then those only in the second."""
    return [Pair(name, a.get(name), b.get(name)) for name in {**a, **b}]


def _tables(compared: ComparedPass) -> dict[str, list[Pair]]:
    """The tables of a pass, by heading; shares as percentages, to one digit."""
    shares = [
        Pair(p.name, *(None if v is None else round(100 * v, 1) for v in (p.first, p.second)))
        for p in compared.findings
    ]
    tables = {
        "Cycles": compared.cycles,
        "Cycles by operation": compared.operations,
        "Memory of the fullest tile, bytes": compared.memory,
        "Findings, % of the cycles or of a tile's memory": shares,
    }
    return {name: [p for p in pairs if p.first or p.second] for name, pairs in tables.items()}


def _changes(compared: ComparedPass) -> dict[str, str]:
    """Titles of the findings that only one of the two has."""
    both = {"No longer found in B": compared.gone, "New in B": compared.came}
    return {
        what: ", ".join(finding.title.lower() for finding in several) or "nothing"
        for what, several in both.items()
    }


def _only_in_one(comparison: Comparison) -> list[str]:
    names = {"A": comparison.only_first, "B": comparison.only_second}
    return [f"Only in {where}: {', '.join(map(words, n))}." for where, n in names.items() if n]


def render_comparison(comparison: Comparison) -> str:
    """The tables of every pass as HTML."""
    titles = f"A: {esc(comparison.first)}. B: {esc(comparison.second)}."
    out = [f"<p>{titles} Changes are those from A to B.</p>"]
    out += [f"<p>{esc(line)}</p>" for line in _only_in_one(comparison)]
    for compared in comparison.passes:
        if compared.name:
            out.append(f'<h3 class="pass">{esc(words(compared.name)).capitalize()}</h3>')
        out.append('<div class="pair">')
        for heading, pairs in _tables(compared).items():
            head = ["", "#A", "#B", "#difference", "#change"]
            rows = map(_row, pairs)
            out.append(f"<div><h3>{heading}</h3>{table(head, rows, 'narrow')}</div>")
        out.append("</div>")
        out += [
            f"<p><b>{what}:</b> {esc(titles)}.</p>" for what, titles in _changes(compared).items()
        ]
    return "".join(out)


def _row(pair: Pair) -> tuple[str, list[Any]]:
    difference = round((pair.second or 0) - (pair.first or 0), 6)
    cells = [esc(words(pair.name)), pair.first, pair.second, "", ""]
    if not difference:
        return "", cells
    cells[3] = f"{'+' if difference > 0 else ''}{number(difference)}"
    cells[4] = "" if pair.change is None else f"{100 * pair.change:+.1f}\u00a0%"
    return "up" if difference > 0 else "down", cells


_WIDTH = 96
_MOST_STEPS = 12


@check_types
def profile_text(title: str, profiles: Sequence[Profile]) -> str:
    """Text with the summary and three findings of each pass."""
    check_kind("profiles", profiles, (list, tuple), "a list of Profile")
    lines = [check_kind("title", title, str, "a text")]
    for profile in profiles:
        check_kind("one of profiles", profile, Profile, "a Profile")
        name = words(profile.name).capitalize() or "Run"
        did_not = "" if profile.cycles else " did not run"
        lines += ["", f"{name}:{did_not}", textwrap.indent(profile.summary(_MOST_STEPS), "  ")]
        ranked = findings(profile)
        for place, finding in enumerate(ranked[:3], 1):
            text = f"{place}. {finding.title}. {finding.text} {finding.remedy}"
            lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="     ")
        if not ranked:
            lines.append("  No rule finds anything that stands out.")
    return "\n".join(line.replace("\u00a0", " ").rstrip() for line in lines)


@check_types
def comparison_text(comparison: Comparison) -> str:
    """The figures of both as text, and the changes from A to B."""
    lines = [f"A: {comparison.first}", f"B: {comparison.second}"]
    lines += _only_in_one(comparison)
    for compared in comparison.passes:
        head = words(compared.name).capitalize() or "Run"
        lines += ["", f"{head:<36}{'A':>14}{'B':>14}{'change':>10}"]
        for heading, pairs in _tables(compared).items():
            lines += [heading, *map(_text_row, pairs)]
        lines += [f"{what}: {titles}" for what, titles in _changes(compared).items()]
    return "\n".join(line.rstrip() for line in lines)


def _text_row(pair: Pair) -> str:
    a, b = ("" if value is None else number(value) for value in (pair.first, pair.second))
    change = "" if pair.change is None else f"{100 * pair.change:+.1f} %"
    return f"  {words(pair.name)[-33:]:<34}{a:>14}{b:>14}{change:>10}"
