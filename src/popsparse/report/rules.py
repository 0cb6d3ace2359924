"""Findings: rules over the profile of a run that name what costs most, with remedies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynsparse._core.checks import check_types
from popsparse.machine import Profile, StepProfile
from popsparse.report.charts import esc, number, percent, words
from popsparse.report.steps import short_names


@dataclass(frozen=True)
class Finding:
    """A cost and its remedy.

    Attributes:
        rule: name of the rule.
        title: a few words.
        text: the finding, with figures.
        remedy: what to change, with the names of the options.
        share: its share of the run's cycles, 0 to 1; for rules about memory the share of a tile's
            memory in use, above 1 if it does not fit.
    """

    rule: str
    title: str
    text: str
    remedy: str
    share: float


_LEAST = 0.05
"""Share of the run's cycles below which a cost is not reported."""


def _over_memory(profile: Profile) -> Finding | None:
    tile, need, limit = _fullest(profile)
    if need <= limit:
        return None
    return Finding(
        "memory over",
        "Memory does not suffice",
        f"Tile {tile:,} needs {number(need)} B and has {number(limit)}, {number(need - limit)} too "
        f"little; {_largest(profile)}.",
        "Lower --batch or --available-memory-proportion (the option available_memory_proportion of "
        "plans), or use more --tiles; in your own programs spread the largest variable over "
        "more tiles with Graph.map_linearly.",
        need / limit,
    )


def _near_memory(profile: Profile) -> Finding | None:
    tile, need, limit = _fullest(profile)
    if not 0.9 <= need / limit <= 1:
        return None
    return Finding(
        "memory near",
        "Memory is nearly full",
        f"Tile {tile:,} holds {number(need)} of {number(limit)} B ({percent(need, limit)}); "
        f"{_largest(profile)}.",
        "A lower --available-memory-proportion makes the planner choose plans with less temporary "
        "data, mostly at some cost in cycles; a smaller --batch or more --tiles help as well.",
        need / limit,
    )


def _always_live(profile: Profile) -> Finding | None:
    tile, _, limit = _fullest(profile)
    always = int(profile.contents.bytes_on(tile)[profile.contents.always].sum())
    if always < 0.5 * limit:
        return None
    return Finding(
        "always live",
        "Half of the memory is never free",
        f"On tile {tile:,} {number(always)} of {number(limit)} B ({percent(always, limit)}) belong "
        f"to variables that are live in every step; {_largest(profile)}.",
        "Weights, operands and results that the host reads must stay. A lower --density, a smaller "
        "--oversize or more --tiles make them smaller. In your own programs remove handles "
        "(add_handle) and initial values that are not needed, and mark with WriteUndef where "
        "contents are no longer needed.",
        always / limit,
    )


def _fullest(profile: Profile) -> tuple[int, int, int]:
    """The fullest tile, its bytes, and those of any tile."""
    use = profile.memory
    return use.worst_tile, use.max_tile_bytes, use.limit


def _largest(profile: Profile) -> str:
    held = profile.contents.variables_on(profile.memory.worst_tile)
    return "the largest there: " + ", ".join(f"{v.name} {number(b)} B" for v, b in held[:3])


def _compute_steps(profile: Profile) -> list[StepProfile]:
    return [s for s in profile.steps if s.kind == "compute" and s.tiles and s.compute]


def _waiting_cycles(step: StepProfile, tiles: int) -> float:
    """Mean cycles that the tiles computing in a step wait for the slowest of them."""
    return step.compute * (1 - step.balance * tiles / step.tiles)


def _imbalance(profile: Profile) -> Finding | None:
    tiles, names = profile.target.tiles, short_names(profile)
    # Work that a few tiles do for all is not an imbalance, nor is the propagation of spills.
    passing = set(map(id, _propagation(profile)))
    steps = [s for s in _compute_steps(profile) if s.tiles > 0.1 * tiles and id(s) not in passing]
    lost = sum(_waiting_cycles(step, tiles) for step in steps)
    if lost < _LEAST * profile.cycles:
        return None
    worst = max(steps, key=lambda step: _waiting_cycles(step, tiles))
    busy = worst.balance * tiles / worst.tiles
    return Finding(
        "imbalance",
        "Tiles wait for the slowest one",
        f"In {percent(lost, profile.cycles)} of the run's cycles the average tile has done its "
        f"part of a step and waits for the busiest. Most of it in "
        f"{names[profile.steps.index(worst)]}, where it works {percent(busy)} of the time.",
        "Blocks spread unevenly fill some parts of the plan more than others: try another cut with "
        '--plan-constraints \'{"partition": {"x": ..}}\', a larger --block-size, or a pattern that '
        "is more even. In programs of your own spread the vertices more evenly over the tiles.",
        lost / profile.cycles,
    )


def _unused(profile: Profile) -> Finding | None:
    tiles, used = profile.target.tiles, int(np.count_nonzero(profile.tile_cycles))
    if not used:
        return None
    share = profile.compute_cycles * (1 - used / tiles) / profile.cycles
    if share < _LEAST:
        return None
    return Finding(
        "tiles unused",
        "Tiles without work",
        f"{tiles - used:,} of {tiles:,} tiles compute nothing in the run.",
        "A larger --batch, or several products side by side, give them work; a plan with more "
        'parts is asked for with --plan-constraints \'{"partition": {"z": ..}}\'. If there is no '
        "more work, as many fewer --tiles cost nothing.",
        share,
    )


def _exchange(profile: Profile) -> Finding | None:
    spent = profile.exchange_cycles
    if spent < 0.1 * profile.cycles:
        return None
    names = short_names(profile)
    worst = max(range(len(names)), key=lambda i: profile.steps[i].exchange)
    step = profile.steps[worst]
    return Finding(
        "exchange",
        "Data moves between tiles",
        f"Moving data takes {percent(spent, profile.cycles)} of the cycles, most of it in "
        f"{names[worst]} ({number(step.exchange)} cycles for {number(step.received)} B).",
        "Move less for what is computed: a larger --batch for the same weights; of sparse products "
        "a larger --block-size, or fewer parts along the dimension that is summed over "
        "(--plan-constraints). A higher --available-memory-proportion lets plans keep what they "
        "would fetch again.",
        spent / profile.cycles,
    )


def _sync(profile: Profile) -> Finding | None:
    spent = profile.sync_cycles
    runs = sum(step.runs for step in profile.steps)
    if spent < _LEAST * profile.cycles:
        return None
    return Finding(
        "sync",
        "Synchronisation",
        f"Synchronisation takes {percent(spent, profile.cycles)} of the cycles: {runs:,} steps of "
        f"{number(profile.cycles / max(runs, 1))} cycles on average.",
        "Do more in a step: a larger --batch; fewer and larger products. In programs of your own "
        "join copies into one Copy and computations into one compute set.",
        spent / profile.cycles,
    )


def _host(profile: Profile) -> Finding | None:
    spent = profile.host_cycles
    if spent < _LEAST * profile.cycles:
        return None
    return Finding(
        "host",
        "Transfers to and from the host",
        f"Streams to and from the host, and remote buffers, take {percent(spent, profile.cycles)} "
        "of the cycles.",
        "Send less, and less often: pool gradients on the tiles (--update sum, avg or max in place "
        "of none), update the pattern at a larger interval, keep on the tiles what is needed "
        "again.",
        spent / profile.cycles,
    )


def _propagation(profile: Profile) -> list[StepProfile]:
    """The steps that pass spilled blocks on: none where the program only found that it has none."""
    steps = [
        (name.split("/"), step)
        for name, step in zip(short_names(profile), profile.steps, strict=True)
        if "propagation" in name.split("/") and step.runs
    ]
    return [step for _, step in steps] if any("loop" in names for names, _ in steps) else []


def _spilled(profile: Profile) -> Finding | None:
    spent = sum(step.cycles for step in _propagation(profile))
    if spent < _LEAST * profile.cycles:
        return None
    return Finding(
        "propagation",
        "Spilled blocks",
        "Some tiles have more blocks than fit in the buckets of the plan; passing the others on to "
        f"tiles with room (propagation) takes {percent(spent, profile.cycles)} of the cycles.",
        "Raise --oversize (the option meta_info_bucket_oversize_proportion), which costs memory, "
        "or spread the pattern more evenly over the rectangles of the plan.",
        spent / profile.cycles,
    )


def _below_peak(profile: Profile, summary: Mapping[str, Any]) -> Finding | None:
    steps = [s for s in _compute_steps(profile) if s.flops and s.peak_flops]
    tiles = profile.target.tiles

    def lost(step: StepProfile) -> float:
        """Mean cycles that the computing tiles lose against the peak rate of their units."""
        busy = step.compute * step.balance * tiles / step.tiles
        return max(busy - step.flops / (step.tiles * step.peak_flops), 0.0)

    total = sum(map(lost, steps))
    if total < 0.3 * profile.cycles:
        return None
    worst = max(steps, key=lost)
    rate = worst.flops / (worst.compute * worst.tiles * worst.peak_flops)
    return Finding(
        "below peak",
        "Matrix units are idle",
        f"If the units of the tiles that multiply matrices always worked at their peak rate, the "
        f"run would take {percent(total, profile.cycles)} fewer cycles; most of them in "
        f"{short_names(profile)[profile.steps.index(worst)]}, which reaches {percent(rate)} of "
        "that rate.",
        _to_reach_the_peak(summary),
        total / profile.cycles,
    )


_AT_PEAK = {
    "block_size": (16, "blocks of 16 (--block-size 16)"),
    "dtype": ("float16", "float16 values (--dtype float16)"),
    "partials": ("float16", "float16 partial sums (--partials-type float16)"),
}
"""Requirements of the peak rate: by entry of a summary, its value and how to get it."""


def _to_reach_the_peak(summary: Mapping[str, Any]) -> str:
    """The remedy, without what the run already has according to its summary."""
    missing = [how for key, (value, how) in _AT_PEAK.items() if summary.get(key) != value]
    reach = f"The peak rate takes {', '.join(missing)}. " if missing else ""
    return reach + "A larger --batch spreads the fixed cost of each block over more samples."


def _rearranging(profile: Profile) -> Finding | None:
    """Copies inside tiles: exchanges that have compute cycles, and steps of local copies only."""
    moved = [s for s in profile.steps if s.kind == "exchange" and s.compute]
    copies = {node.step for node in profile.tree() if node.kind == "Copy"}
    moved += [s for i, s in enumerate(profile.steps) if s.kind == "compute" and i in copies]
    spent = sum(step.compute for step in moved)
    if spent < _LEAST * profile.cycles:
        return None
    worst = max(moved, key=lambda step: step.compute)
    return Finding(
        "rearranging",
        "Data is rearranged within tiles",
        f"Copies inside tiles take {percent(spent, profile.cycles)} of the cycles, most of it in "
        f"{short_names(profile)[profile.steps.index(worst)]}.",
        "Make operands with the product's own functions (create_fully_connected_input, "
        "create_sparse_dense_matmul_rhs, ...), so that they lie where it wants them; let one "
        "vertex read what another wrote without a copy between them.",
        spent / profile.cycles,
    )


_Rules = tuple[Callable[[Profile], Finding | None], ...]
MEMORY_RULES: _Rules = (_over_memory, _near_memory, _always_live)
CYCLE_RULES: _Rules = (
    _imbalance,
    _unused,
    _exchange,
    _sync,
    _host,
    _spilled,
    _rearranging,
)


@check_types
def findings(profile: Profile, summary: Mapping[str, Any] | None = None) -> list[Finding]:
    """The findings of a run, the costliest first; insufficient memory comes before all others.

    Args:
        profile: profile of the run.
        summary: figures of the product, as for `report_html`; remedies omit what it already has.
    """
    results = [rule(profile) for rule in MEMORY_RULES]
    if profile.cycles:
        results += [rule(profile) for rule in CYCLE_RULES]
        results.append(_below_peak(profile, summary or {}))
    return sorted(filter(None, results), key=_sort_key, reverse=True)


def _sort_key(finding: Finding) -> float:
    """Sort key. Memory costs nothing while it suffices; nearly full memory counts little."""
    if finding.rule == "memory over":
        return 1 + finding.share
    return finding.share - 0.75 if finding.rule in ("memory near", "always live") else finding.share


_MOST_FINDINGS = 3


def _mark_options(remedy: str) -> str:
    """Format options as code, without line breaks inside."""
    return re.sub(r"--[a-z][a-z-]*", r"<code>\g<0></code>", esc(remedy))


def render_findings(passes: Sequence[tuple[str, Sequence[Finding]]]) -> str:
    """The first findings of each pass, by name."""
    out = []
    for name, several in passes:
        if name:
            out.append(f'<h3 class="pass">{esc(words(name)).capitalize()}</h3>')
        if not several:
            out.append("<p>No rule finds anything that stands out.</p>")
            continue
        rows = "".join(
            f"<li><b>{esc(finding.title)}.</b> {esc(finding.text)}"
            f"<p><i>What to do:</i> {_mark_options(finding.remedy)}</p></li>"
            for finding in several[:_MOST_FINDINGS]
        )
        out.append(f'<ol class="findings">{rows}</ol>')
        if more := several[_MOST_FINDINGS:]:
            out.append(
                "<p>Also: " + ", ".join(esc(finding.title.lower()) for finding in more) + ".</p>"
            )
    return "".join(out)
