"""The sections on a pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynsparse._core.checks import check_kind
from popsparse.machine import Profile, ProgramNode
from popsparse.machine.profile import PARTS
from popsparse.report.charts import (
    bar,
    esc,
    grid_map,
    histogram,
    legend,
    number,
    percent,
    stacked_tiles,
    table,
    words,
)
from popsparse.report.steps import render_parts_legend

_MOST_NODES = 600
_MOST_DEPTH = 60
_CLASSES = {"Execute": "compute", "Copy": "exchange", "Sync": "sync"}
"""Kinds of programs, with the colours of their costs."""


def render_tree(program: Sequence[ProgramNode], step_names: Sequence[str], total: float) -> str:
    """Collapsible nested lists: programs that ran are open, shared ones are shown once."""
    shown: set[int] = set()
    lines = 0
    is_complete = True

    def line(node: int, label: str, runs: int, depth: int) -> str:
        nonlocal lines, is_complete
        current = program[node]
        if current.kind == "Sequence" and not current.parts:
            return ""
        if lines == _MOST_NODES or depth > _MOST_DEPTH:
            is_complete = False
            return ""
        lines += 1
        cycles = current.cycles * runs / current.runs if current.runs else 0.0
        colour = _CLASSES.get(current.kind, "")
        name = current.name or ("" if current.step is None else step_names[current.step])
        text = f"<em>{esc(label)}:</em> " if label else ""
        text += f'<b class="kind {colour}">{esc(current.kind)}</b> {esc(name)}'
        if not runs:
            inside = "" if node in shown else _inside(current, depth)
            return _row(text, '<span class="none">not taken</span>', inside, "no")
        figures = f"<span>{runs:,} ×</span><span>{number(cycles)}</span>"
        figures += f"<span>{percent(cycles, total)}</span>" + bar([("compute", cycles)], total)
        if node in shown:
            return _row(text + " <small>as above</small>", figures, "", "")
        shown.add(node)
        return _row(text, figures, _inside(current, depth), "open")

    def _inside(current: ProgramNode, depth: int) -> str:
        return "".join(line(child, label, runs, depth + 1) for label, child, runs in current.parts)

    html = line(0, "", program[0].runs, 0) if program else ""
    if not is_complete:
        html += f"<p>{lines:,} of {len(program):,} programs are shown.</p>"
    return (
        "<p>How often each program ran and what all its runs cost, with those inside it. "
        "Fold by clicking.</p>"
        '<div class="tree"><p class="head"><span>runs</span><span>cycles</span>'
        f"<span>share</span><span></span></p>{html}</div>"
    )


def _row(text: str, figures: str, inside: str, state: str) -> str:
    line = f'<span class="what">{text}</span><span class="figures">{figures}</span>'
    if not inside:
        return f'<p class="{state}">{line}</p>' if state == "no" else f"<p>{line}</p>"
    opened = " open" if state == "open" else ""
    kind = ' class="no"' if state == "no" else ""
    return f"<details{opened}{kind}><summary>{line}</summary>{inside}</details>"


def render_balance(profile: Profile) -> str:
    """The cycles of the whole run by part."""
    shares = [
        (part, f"{part} {number(cycles)} ({percent(cycles, profile.cycles)})")
        for part, cycles in profile.parts.items()
        if cycles
    ]
    counts = ", ".join(f"{number(n)} {esc(what)}" for what, n in profile.counts.items())
    whole = sum(profile.parts.values())
    return (
        f"<p><b>{number(profile.cycles)} cycles</b>, {number(profile.seconds * 1e6)} µs on "
        f"{esc(profile.target.name)} at {profile.target.clock_hz / 1e9:g} GHz"
        + (f": {counts}" if counts else "")
        + f'.</p><p class="wide">{bar(profile.parts.items(), whole)}</p>{legend(shares)}'
    )


def render_timeline(profile: Profile, identity: str) -> str:
    """The frame the script draws into."""
    cut = ""
    if not profile.timeline_is_whole:
        cut = f" Only the first {number(len(profile.timeline))} runs of steps were recorded."
    if profile.parallel_cycles:
        cut += (
            f" Steps of several processors that ran at once, {number(profile.overlapped_cycles)} "
            "cycles, are drawn one after the other."
        )
    return (
        "<p>All tiles take each step together: synchronisation, exchange, compute. Where several "
        "steps share a pixel, height is the share of that moment. Drag to zoom in, double-click "
        f"for everything.{cut}</p>"
        f'<div class="timeline" data-source="{esc(identity)}">'
        '<div class="controls"><button data-do="in" title="zoom in">+</button>'
        '<button data-do="out" title="zoom out">−</button>'
        '<button data-do="left" title="earlier">◀</button>'
        '<button data-do="right" title="later">▶</button>'
        '<button data-do="all">all</button><output></output></div>'
        f"<canvas></canvas></div>{render_parts_legend(profile)}"
        "<noscript><p>The timeline needs JavaScript; the tables do not.</p></noscript>"
    )


def render_tiles(profile: Profile, identity: str, memory_of: str = "") -> str:
    """Memory and occupancy of every tile, and their distributions.

    `memory_of` names a pass of the same program with the same memory, which is not shown again.
    """
    use = profile.memory
    memory, worst = use.per_tile, use.worst_tile
    out = []
    if memory_of:
        out.append(f"<p>Memory: on every tile as in {esc(words(memory_of))}.</p>")
    else:
        by_category = memory_by_category(profile)
        least, middle = float(memory.min()), float(np.median(memory))
        over = int((memory > use.limit).sum())
        warning = f' <strong class="warn">Too much for {over:,} tiles.</strong>' if over else ""
        out.append(
            "<h3>Memory</h3>"
            f"<p>Fullest: tile {worst:,} with {number(use.max_tile_bytes)} of "
            f"{number(use.limit)} B ({percent(use.max_tile_bytes, use.limit)}). "
            f"Median {number(middle)} B, least {number(least)} B.{warning}</p>"
            + '<div class="pair">'
            + stacked_tiles(
                by_category,
                identity=f"{identity}-memory",
                unit="bytes",
                limit=use.limit,
                limit_label=f"memory of a tile, {number(use.limit)} B",
            )
            + histogram(memory, unit="bytes in use")
            + "</div>"
            + legend(
                (f"c{i}", f"{name} (tile {worst:,}: {number(sizes[worst])} B)")
                for i, (name, sizes) in enumerate(by_category.items())
            )
        )
    computing, exchanging = profile.tile_cycles, profile.tile_exchange
    busy = computing + exchanging
    if profile.cycles and busy.any():
        share = 100 * busy / profile.cycles
        out.append(
            "<h3>Occupancy</h3>"
            f"<p>Cycles in which each tile itself computed or exchanged, of the run's "
            f"{number(profile.cycles)}; the rest it waited for slower tiles or synchronised. "
            f"On average {percent(float(share.mean()) / 100)}, at most "
            f"{percent(float(share.max()) / 100)}.</p>"
            + '<div class="pair">'
            + stacked_tiles(
                {"compute": computing, "exchange": exchanging},
                identity=f"{identity}-cycles",
                unit="cycles",
                limit=profile.cycles,
                limit_label=f"the run, {number(profile.cycles)} cycles",
            )
            + histogram(share, unit="% of the run in use")
            + "</div>"
            + legend([("c0", "compute"), ("c1", "exchange")])
        )
    received = profile.received_bytes
    if received.any():
        out.append(
            "<h3>Bytes received</h3><p>"
            f"{number(float(received.sum()))} B in all, {number(float(profile.sent_bytes.sum()))} "
            "B sent: several tiles may receive the same byte. Most on one tile: "
            f"{number(float(received.max()))} B.</p>"
            + '<div class="pair">'
            + stacked_tiles({"received": received}, identity=f"{identity}-received", unit="bytes")
            + histogram(received, unit="bytes received")
            + "</div>"
        )
    return "".join(out)


def memory_by_category(profile: Profile) -> dict[str, np.ndarray]:
    """Bytes of the tiles, by category, without empty ones."""
    return {name: sizes for name, sizes in profile.memory.by_category.items() if sizes.any()}


def render_predicted(predicted: Mapping[str, Any], profiles: Sequence[Profile]) -> str:
    """Steps of each pass as the execution model counts them (`PassTime.to_dict`).

    If the machine ran the pass, the difference is shown.
    """
    ran = {profile.name: profile.cycles for profile in profiles}
    out = []
    for name, time in predicted.items():
        check_kind(f"the pass {name}", time, Mapping, "what PassTime.to_dict gives")
        cycles = float(time["cycles"])
        rows: list[list[Any]] = []
        for step in time["steps"]:
            parts = {key: float(step[key]) for key in ("compute", "exchange")}
            share = percent(sum(parts.values()), cycles)
            shown = bar(parts.items(), cycles)
            rows.append([esc(step["name"]), *parts.values(), step["syncs"], share, shown])
        if sync := time["sync_cycles"]:
            shown = bar([("sync", sync)], cycles)
            label = "synchronisation, all steps"
            rows.append([label, None, None, None, percent(sync, cycles), shown])
        head = ["step", "#compute", "#exchange", "#synchronisations", "#share", "="]
        title = esc(words(str(name)))
        out.append(f"<h3>{title}: {number(cycles)} cycles</h3>")
        if ran.get(str(name)) and cycles:
            measured = ran[str(name)]
            more = 100 * (measured - cycles) / cycles
            out.append(f"<p>The machine took {number(measured)} ({more:+.1f} %).</p>")
        out.append(table(head, rows))
    return "".join(out) + legend((part, part) for part in PARTS[:3])


def _columns(tiles: int) -> int:
    """Number of columns: about twice as many as rows and, if possible, with every row full."""
    target = max(round(math.sqrt(2 * tiles)), 1)
    near = range(max(target // 2, 1), 2 * target + 1)
    full = [n for n in near if tiles % n == 0]
    return min(full, key=lambda n: abs(n - target)) if full else target


def render_tile_map(used: np.ndarray, limit: float, identity: str) -> str:
    """The map of bytes [tiles]; tiles run to the right, then down. Tiles that need more than
    `limit` have a warm colour."""
    columns = _columns(len(used))
    rows = -(-len(used) // columns)
    cells = np.full(rows * columns, np.nan)
    cells[: len(used)] = used
    return grid_map(
        cells.reshape(rows, columns),
        identity=identity,
        axes=("row by row", "tiles"),
        unit="B",
        capacity=limit if used.max() > limit else None,
        turn=False,
    )


def render_tile_contents(profile: Profile, identity: str) -> str:
    """The map, and the frame for the contents of a tile, chosen by a click or by its number."""
    used, tile = profile.memory.per_tile, profile.memory.worst_tile
    name = esc(identity)
    return (
        f'<div class="tile-contents" data-source="{name}" data-memory="{name}-memory" '
        f'data-tiles="{len(used)}"><h3>What lies where</h3>'
        "<p>Every tile in the colour of the memory in use. Click on one to see what it holds, "
        f'<label>or give its number: <input type="number" min="0" max="{len(used) - 1}" '
        f'value="{tile}"></label></p>'
        + render_tile_map(used, profile.memory.limit, f"{identity}-map")
        + '<div class="what"></div></div>'
    )
