"""Fills in the tables of Markdown pages from the figures of `dynsparse bench`.

    python docs/tools/bench_tables.py figures.json [OTHER.json ...] --page PAGE.md ...

A table stands between two comments, `<!-- bench: VIEW NAME ... -->` and `<!-- /bench -->`: one of
`VIEWS` and the benchmarks it shows, or one of `MACHINE_VIEWS`, of the same benchmarks on every
machine. `@FILE` after the names takes another machine's figures, those of FILE.json.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench_laws import POPSPARSE, BreakEven, break_even, fit_laws, most_threads, points

from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse.bench.results import load_results
from dynsparse.report import bench as tables
from dynsparse.report.bench import (
    NAMES,
    collect_cells,
    describe_measurement,
    footnotes,
    format_range,
    format_spread,
    machine_name,
    size_columns,
    table,
)

Figures = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
Summary = dict[str, tuple[float, float, float]]
"""contender -> median, smallest and largest cell."""


def summaries_of(
    results: Figures, names: list[str]
) -> dict[tuple[int, float], tuple[int, Summary]]:
    """(block, density) -> number of cells, and their ratios."""
    by_size: dict[tuple[int, float], list[Figures]] = {}
    for cell in collect_cells(results, names):
        by_size.setdefault((cell["block"], cell["density"]), []).append(cell["ratios"])
    groups = {}
    for key, ratios in by_size.items():
        summary = {}
        for who in NAMES:
            medians = [cell[who]["median"] for cell in ratios if who in cell]
            if medians:
                summary[who] = statistics.median(medians), min(medians), max(medians)
        groups[key] = len(ratios), summary
    return groups


def present(summaries: Iterable[Summary]) -> list[str]:
    """The contenders in any of the summaries, in the order of the columns."""
    used = {name for summary in summaries for name in summary}
    return [name for name in NAMES if name in used]


def in_columns(summary: Summary, who: list[str]) -> list[str]:
    """A table cell per contender."""
    return [format_range(*summary[name]) if name in summary else "" for name in who]


def _summary(results: Figures, names: list[str]) -> str:
    """By density and block: the median over cells, with the smallest and the largest."""
    groups = summaries_of(results, names)
    who = present(summary for _, summary in groups.values())
    rows = [
        [f"{block}", f"{density:g}", f"{count}", *in_columns(summary, who)]
        for (block, density), (count, summary) in groups.items()
    ]
    return table(["block", "density", "cells", *[NAMES[name] for name in who]], rows)


def _losses(results: Figures, names: list[str]) -> str:
    """The cells that take more than a tenth longer than dense, worst first."""
    cells = [cell for cell in collect_cells(results, names) if "dense" in cell["ratios"]]
    slow = [cell for cell in cells if 1.1 * cell["ratios"]["dense"]["median"] < 1]
    line = f"Of {len(cells)} cells {len(slow)} take more than a tenth longer than dense."
    return line + _worst(slow, "dense")


def _worst(cells: list[Figures], who: str) -> str:
    """A table of `cells` beside a contender, worst first; empty without cells."""
    if not cells:
        return ""
    cells = sorted(cells, key=lambda cell: cell["ratios"][who]["median"])
    head, sizes = size_columns(cells)
    rows = [
        [*sizes(c), format_spread(c["ratios"][who], "\\*" * c["disturbed"]), c["kernel"]]
        for c in cells
    ]
    return f"\n\n{table([*head, NAMES[who], 'kernels'], rows)}"


def _medium(results: Figures, names: list[str]) -> str:
    """Dense products at "medium": their dtype and speed-up, and the cells where they are faster."""
    cells = [cell for cell in collect_cells(results, names) if "dense_medium" in cell["ratios"]]
    lost = [cell for cell in cells if cell["ratios"]["dense_medium"]["median"] < 1]
    shares = [
        cell["ratios"]["dense_medium"]["median"] / cell["ratios"]["dense"]["median"]
        for cell in cells
    ]
    part = format_range(statistics.median(shares), min(shares), max(shares))
    return (
        f'At "medium" this machine multiplies in {results["machine"]["medium"]}, and a dense layer '
        f"takes {part} of the time that it takes otherwise. Of {len(cells)} cells it wins "
        f"{len(lost)}.{_worst(lost, 'dense_medium')}"
    )


def _break_even(results: Figures, names: list[str]) -> str:
    """Break-even densities: a row per layer and batch, a column per block size."""
    layers = {
        ((c["features"][0] * c["features"][1]) ** 0.5, c["batch"]): c["layer"]
        for c in collect_cells(results, names)
    }
    crossings = break_even(list(points(results, "dense", most_threads(results))))
    shown = [c for c in crossings if (c.n, c.batch) in layers]
    blocks = sorted({c.block for c in shown})
    by_key = {(c.n, c.batch, c.block): c for c in shown}
    rows = []
    for (n, batch), layer in layers.items():
        row = [layer, f"{batch}"]
        for block in blocks:
            row.append(_break_even_text(by_key.get((n, batch, block))))
        rows.append(row)
    return table(["features", "batch", *[f"block {block}" for block in blocks]], rows)


def _break_even_text(crossing: BreakEven | None) -> str:
    if crossing is None or (not crossing.crosses and crossing.speedup_there > 2):
        return ""  # measured only where dense is far behind
    densest = f"{crossing.speedup_there:.2f} at {crossing.densest:g}"
    if crossing.density is None:
        return f"slower everywhere; {densest}"
    if not crossing.crosses:
        return f"above {crossing.densest:g}; {densest}"
    return f"{crossing.density:.2f}; {densest}"


def _overhead(results: Figures, names: list[str]) -> str:
    """Microseconds per call."""
    cells = collect_cells(results, names)
    head, sizes = size_columns(cells)
    rows = []
    for cell in cells:
        sparse, dense = (cell["times"][name]["median"] * 1e6 for name in ("dynsparse", "dense"))
        rows.append([*sizes(cell), f"{sparse:.1f}", f"{dense:.1f}", f"{sparse - dense:.1f}"])
    columns = ["dynsparse, µs", "F.linear in nn.Linear, µs", "difference, µs"]
    return table([*head, *columns], rows) + footnotes(results, names, cells)


_SIZES = ("layer", "density", "block", "dtype")
_SIZE_NAMES = ["model", "density", "block", "type"]


def _sizes(cell: Figures) -> list[str]:
    return [f"{cell[key]:g}" if key == "density" else f"{cell[key]}" for key in _SIZES]


def _by_model(cells: list[Figures]) -> list[Figures]:
    """The cells grouped by model, in order of first occurrence."""
    models = list(dict.fromkeys(cell["layer"] for cell in cells))
    return sorted(cells, key=lambda cell: models.index(cell["layer"]))


def _model_ratio(figure: Figures, disturbed: bool) -> str:
    texts = [f"{figure[key]:.2f}" for key in ("median", "low", "high")]
    return f"{texts[0]} ({texts[1]} to {texts[2]})" + "\\*" * disturbed


def steps_table(cells: list[Figures]) -> Table:
    """Training steps: ratios of the blocks, and of the whole model."""
    who = ["masked", "dense"]
    head = [*_SIZE_NAMES, "ms, blocks", *[f"{name}, blocks" for name in who]]
    head += ["ms, whole", *[f"{name}, whole" for name in who]]
    rows = []
    for cell in _by_model(cells):
        row = _sizes(cell)
        for part in (cell, cell["whole"]):
            row.append(milliseconds(part["times"]["dynsparse"]["median"]))
            row += [_model_ratio(part["ratios"][name], cell["disturbed"]) for name in who]
        rows.append(row)
    return head, rows


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"


def memory_table(cells: list[Figures]) -> Table:
    """Peaks in GB, and how many times smaller the blocks' state is than masked and dense."""
    who = ["dynsparse", "masked", "dense"]
    head = [*_SIZE_NAMES, *[f"{name}, GB" for name in who], "state of the blocks, MB",
            "masked / that", "dense / that"]  # fmt: skip
    rows = []
    for cell in _by_model(cells):
        memory = cell["memory"]
        row = _sizes(cell) + [f"{memory[name]['peak'] / 1e9:.2f}" for name in who]
        sparse = memory["dynsparse"]["blocks"]
        row.append(f"{sparse / 1e6:.0f}")
        row += [f"{memory[name]['blocks'] / sparse:.1f}" for name in who[1:]]
        rows.append(row)
    return head, rows


def _law(results: Figures, names: list[str]) -> str:
    """The fitted laws beside PopSparse's."""
    head = ["speed-up over", "c", "a (features)", "b (density)", "e (block)", "spread", "cells"]
    rows = []
    for name, law in fit_laws(results).items():
        # Rounding first and adding 0.0 avoids -0.00.
        powers = [
            "-" if power is None else f"{round(power, 2) + 0.0:.2f}"
            for power in (law.a, law.b, law.e)
        ]
        spread = f"x or / {law.factor:.2f}, at worst {law.worst:.2f}"
        rows.append([NAMES[name], f"{law.c:.2g}", *powers, spread, f"{law.cells}"])
    powers = [f"{POPSPARSE[key]:.2f}" for key in "abe"]
    published = ["dense, PopSparse on an IPU (published)", f"{POPSPARSE['c']:g}"]
    return table(head, [*rows, [*published, *powers, "", ""]])


def _with_figures(results: Figures) -> Figures:
    """The results with the figures that commands wrote in place of cells."""
    entries = results["benchmarks"].items()
    return {**results, "benchmarks": {name: entry.get("figures", entry) for name, entry in entries}}


def _trainings(results: Figures, names: list[str]) -> str:
    """A row per seed: steps, ratio of the times, the updates' share of the time."""
    results = _with_figures(results)
    rows = []
    cells = collect_cells(results, names)
    for cell in cells:
        for training in cell["training"]:
            sparse, masked = (training["contenders"][name] for name in ("dynsparse", "masked"))
            sparsity = f"{100 * (1 - training['density']):.1f} %"
            row = [cell["layer"], sparsity, f"{cell['block']}", f"{training['seed']}"]
            row += [_format_steps(sparse), _format_steps(masked)]
            reached = sparse["seconds"] and masked["seconds"]
            row.append(f"{masked['seconds'] / sparse['seconds']:.1f}" if reached else "")
            share = sparse["update_seconds"] / sparse["curve"][-1][1]
            row.append(f"{sparse['updates']} ({100 * share:.1f} % of the time)")
            rows.append(row)
    head = ["network", "sparsity", "block", "seed", "steps, dynsparse", "steps, masked dense",
            "masked dense's time / dynsparse's", "updates"]  # fmt: skip
    return table(head, rows) + footnotes(results, names, cells)


def _format_steps(run: Figures) -> str:
    return f"not within {run['curve'][-1][0]}" if run["steps"] is None else f"{run['steps']}"


def model_view(make: Callable[[list[Figures]], Table]) -> Callable[[Figures, list[str]], str]:
    def view(results: Figures, names: list[str]) -> str:
        results = _with_figures(results)
        cells = collect_cells(results, names)
        return table(*make(cells)) + footnotes(results, names, cells)

    return view


def parts_table(cells: list[Figures]) -> Table:
    """Milliseconds of every part of a step, for each model at its first density and dtype."""
    models: dict[str, list[Figures]] = {}
    for cell in cells:
        first = models.setdefault(cell["layer"], [cell])[0]
        if cell is not first and all(cell[key] == first[key] for key in ("density", "dtype")):
            models[cell["layer"]].append(cell)
    blocks = sorted({cell["block"] for of_model in models.values() for cell in of_model})
    head = ["model", "part", *[f"dynsparse, block {block}" for block in blocks], "masked", "dense"]
    rows = []
    for name, of_model in models.items():
        sparse = {cell["block"]: cell["parts"]["dynsparse"] for cell in of_model}
        columns = [sparse.get(block) for block in blocks]
        columns += [of_model[0]["parts"][who] for who in ("masked", "dense")]
        for part in of_model[0]["parts"]["dynsparse"]:
            rows.append(
                [name, part, *["" if c is None else milliseconds(c[part]) for c in columns]]
            )
        sums = ["" if c is None else milliseconds(sum(c.values())) for c in columns]
        rows.append([name, "all of it", *sums])
    return head, rows


VIEWS: dict[str, Callable[[Figures, list[str]], str]] = {
    **tables.VIEWS,
    "law": _law,
    "training": _trainings,
    "models": model_view(steps_table),
    "model-memory": model_view(memory_table),
    "summary": _summary,
    "losses": _losses,
    "medium": _medium,
    "break-even": _break_even,
    "overhead": _overhead,
    "parts": model_view(parts_table),
    "machine": describe_measurement,
}
"""Views of benchmarks: view(results, names) -> Markdown."""


def worst_first(machines: list[Figures], names: list[str]) -> list[Figures]:
    """The machines by their median ratio to masked dense over all cells of the benchmarks."""
    return sorted(
        machines,
        key=lambda machine: statistics.median(
            cell["ratios"]["masked"]["median"] for cell in collect_cells(machine, names)
        ),
    )


def _side_by_side(machines: list[Figures], names: list[str]) -> str:
    """By density and block: a row per machine, the median over cells with their range."""
    machines = worst_first(machines, names)
    ran = {machine_name(machine): summaries_of(machine, names) for machine in machines}
    keys = dict.fromkeys(key for groups in ran.values() for key in groups)
    blocks = len({block for block, _ in keys}) > 1
    who = present(summary for groups in ran.values() for _, summary in groups.values())
    rows = []
    for block, density in keys:
        for name, groups in ran.items():
            if (block, density) not in groups:
                continue
            count, summary = groups[block, density]
            row = [*[f"{block}"] * blocks, f"{density:g}", name, f"{count}"]
            rows.append([*row, *in_columns(summary, who)])
    head = [*["block"] * blocks, "density", "machine", "cells", *[NAMES[name] for name in who]]
    return table(head, rows)


def _each(machines: list[Figures], names: list[str]) -> str:
    """A line per machine, in the order of `_side_by_side`."""
    return "\n".join(
        f"- {describe_measurement(machine, names)}" for machine in worst_first(machines, names)
    )


def _memory(machines: list[Figures], names: list[str]) -> str:
    """Growth of peak memory in the benchmark `memory`, largest first."""
    pairs = [(machine, machine["benchmarks"][name]) for machine in machines for name in names]
    pairs.sort(key=lambda pair: -pair[1]["figures"]["peak"])
    rows = [
        [machine_name(machine), f"{memory['figures']['peak'] / 1e6:.0f} MB", memory["measured"]]
        for machine, memory in pairs
    ]
    return table(["machine", "peak growth", "measured"], rows)


MACHINE_VIEWS: dict[str, Callable[[list[Figures], list[str]], str]] = {
    "machines": _side_by_side,
    "machines-list": _each,
    "machines-memory": _memory,
}
"""Views of benchmarks that several machines ran: view(results, names) -> Markdown."""

_PART = re.compile(r"(<!-- bench: ([^>]*?) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill_page(page: Path, results: Figures, others: Mapping[str, Figures] | None = None) -> None:
    """Replace every table of the page whose benchmarks are all in `results`; others stay.

    Args:
        others: figures of other machines, by file name. Without them, tables over machines stay as
            they are.

    Raises:
        ValueError: a page without such comments, an unknown view, or no table to fill in.
    """
    others = others or {}
    text = page.read_text(encoding="utf-8")
    filled = 0

    def fill(match: re.Match[str]) -> str:
        nonlocal filled
        view, *names = match.group(2).split()
        part = _make_part(page, view, names, results, others)
        if part is None:
            return match.group(0)
        filled += 1
        return f"{match.group(1)}\n{part}\n\n{match.group(3)}"

    text = _PART.sub(fill, text)
    if not filled:
        raise ValueError(
            f"{page}: expected tables between <!-- bench: VIEW NAME --> and <!-- /bench --> of "
            f"benchmarks that were measured ({', '.join(results['benchmarks'])}), got none"
        )
    atomic_write_text(page, text)


def _make_part(
    page: Path, view: str, names: list[str], results: Figures, others: Mapping[str, Figures]
) -> str | None:
    """The text between two comments; None if its figures are missing."""
    if view in MACHINE_VIEWS:
        machines = [results, *others.values()]
        ran = [
            machine for machine in machines if all(name in machine["benchmarks"] for name in names)
        ]
        return MACHINE_VIEWS[view](ran, names) if len(ran) > 1 else None
    if view not in VIEWS:
        raise ValueError(
            f"{page}: expected <!-- bench: VIEW NAME --> with one of "
            f"{', '.join([*VIEWS, *MACHINE_VIEWS])}, got {view!r}"
        )
    if names and names[-1].startswith("@"):
        *names, other = names
        if other[1:] not in others:
            return None
        results = others[other[1:]]
    if not all(name in results["benchmarks"] for name in names):
        return None
    return VIEWS[view](results, names)


def main(arguments: list[str] | None = None) -> None:
    """Fill in the pages."""
    parser = argparse.ArgumentParser(description="Fill in the tables of pages from figures.")
    parser.add_argument("figures", type=Path, nargs="+", help="first those of the pages' machine")
    parser.add_argument("--page", type=Path, nargs="+", required=True)
    options = parser.parse_args(arguments)
    results = load_results(options.figures[0])
    others = {file.stem: load_results(file) for file in options.figures[1:]}
    for page in options.page:
        fill_page(page, results, others)


if __name__ == "__main__":
    main()
