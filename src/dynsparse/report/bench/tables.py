"""Tables in Markdown from the figures of `dynsparse bench`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from dynsparse.report.bench.models import Table, memory_table, parts_table, steps_table

__all__ = [
    "NAMES",
    "VIEWS",
    "between",
    "cells_of",
    "in_columns",
    "machine_line",
    "machine_name",
    "measured_line",
    "present",
    "summaries_of",
    "table",
    "whole_report",
]

Figures = dict[str, Any]
Summary = dict[str, tuple[float, float, float]]
"""contender -> median, smallest and largest cell."""

NAMES = {
    "masked": "masked dense",
    "dense": "dense",
    "masked_medium": 'masked dense at "medium"',
    "dense_medium": 'dense at "medium"',
    "mkl": "MKL's sparse products",
    "bsr": "torch BSR",
    "scipy": "SciPy (1 thread)",
    "one_thread": "dynsparse on 1 thread",
    "dynsparse": "dynsparse",
}
"""The contenders in the order of columns, and what these are called."""

_PARTS = {
    "drop": "ranking to drop",
    "growth": "growth",
    "dense_topk": "growth by dense gradient and top-k",
    "rewiring": "rewiring",
    "encoding": "encoding",
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine_name(results: Figures) -> str:
    """The processor and its cores: what tells machines apart in a table."""
    machine = results["machine"]
    return f"{machine['processor']}, {machine['cores']} cores"


def machine_line(results: Figures) -> str:
    """What the figures were measured on, in one sentence."""
    machine = results["machine"]
    versions = [f"{name} {version}" for name, version in machine["versions"].items()]
    if machine["python"]:  # of figures that somebody noted down by hand it may not be known
        versions.append(f"Python {machine['python']}")
    kernels = f"kernels for {machine['isa']}" if machine["kernels"] == "native" else "plain torch"
    mkl = "MKL" if machine["mkl"] else "no MKL"
    return (
        f"{machine_name(results)}, {machine['system']}; {kernels}; {', '.join([*versions, mkl])}."
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def between(middle: float, low: float, high: float) -> str:
    return f"{_ratio(middle)} ({_ratio(low)} to {_ratio(high)})"


def _spread(figure: dict[str, float] | None, mark: str = "") -> str:
    if figure is None:
        return ""
    if "low" not in figure:  # noted down by hand
        return _ratio(figure["median"]) + mark
    return between(figure["median"], figure["low"], figure["high"]) + mark


def _sizes(cells: list[Figures]) -> tuple[list[str], Callable[[Figures], list[str]]]:
    """The columns of the sizes; block, threads and dtype only where cells differ in them."""
    keys = ["layer", "batch", "density"]
    keys += [k for k in ("block", "threads", "dtype") if len({cell[k] for cell in cells}) > 1]

    def texts(cell: Figures) -> list[str]:
        return [f"{cell[key]:g}" if key == "density" else f"{cell[key]}" for key in keys]

    return ["features", *keys[1:]], texts


def _speedups(results: Figures, names: list[str]) -> str:
    """Every cell, with the ratio of every contender, and the kernels where not all are sparse."""
    cells = cells_of(results, names)
    head, sizes = _sizes(cells)
    chosen = any(cell["kernel"] != "sparse" for cell in cells)
    who = [name for name in NAMES if any(name in cell["ratios"] for cell in cells)]
    rows = [
        [
            *sizes(cell),
            *[_spread(cell["ratios"].get(name), "\\*" * cell["disturbed"]) for name in who],
            *[cell["kernel"]] * chosen,
        ]
        for cell in cells
    ]
    head += [*[NAMES[name] for name in who], *["kernels"] * chosen]
    return table(head, rows) + _notes(results, names, cells)


def _notes(results: Figures, names: list[str], cells: list[Figures]) -> str:
    lines = []
    if any(cell.get("disturbed") for cell in cells):
        lines.append("\\* others took part of the machine in every attempt.")
    refused = [
        f"{one['cell']}: {one['why']}."
        for n in names
        for one in results["benchmarks"][n]["refused"]
    ]
    if refused:
        lines.append(f"Not measured: {' '.join(refused)}")
    return "".join(f"\n\n{line}" for line in lines)


def summaries_of(
    results: Figures, names: list[str]
) -> dict[tuple[int, float], tuple[int, Summary]]:
    """(block, density) -> how many cells, and what they gain."""
    found: dict[tuple[int, float], list[Figures]] = {}
    for cell in cells_of(results, names):
        found.setdefault((cell["block"], cell["density"]), []).append(cell["ratios"])
    groups = {}
    for key, ratios in found.items():
        summary = {}
        for who in NAMES:
            medians = [one[who]["median"] for one in ratios if who in one]
            if medians:
                summary[who] = statistics.median(medians), min(medians), max(medians)
        groups[key] = len(ratios), summary
    return groups


def present(summaries: Iterable[Summary]) -> list[str]:
    """The contenders that any of them has, in the order of the columns."""
    there = {name for summary in summaries for name in summary}
    return [name for name in NAMES if name in there]


def in_columns(summary: Summary, who: list[str]) -> list[str]:
    """A cell of the table per contender."""
    return [between(*summary[name]) if name in summary else "" for name in who]


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
    cells = [cell for cell in cells_of(results, names) if "dense" in cell["ratios"]]
    slow = [cell for cell in cells if 1.1 * cell["ratios"]["dense"]["median"] < 1]
    line = f"Of {len(cells)} cells {len(slow)} take more than a tenth longer than dense."
    return line + _worst(slow, "dense")


def _worst(cells: list[Figures], who: str) -> str:
    """A table of `cells` beside a contender, worst first; nothing without any."""
    if not cells:
        return ""
    cells = sorted(cells, key=lambda cell: cell["ratios"][who]["median"])
    head, sizes = _sizes(cells)
    rows = [
        [*sizes(c), _spread(c["ratios"][who], "\\*" * c["disturbed"]), c["kernel"]] for c in cells
    ]
    return f"\n\n{table([*head, NAMES[who], 'kernels'], rows)}"


def _medium(results: Figures, names: list[str]) -> str:
    """What dense products at "medium" are made of and gain, and the cells that they win."""
    cells = [cell for cell in cells_of(results, names) if "dense_medium" in cell["ratios"]]
    lost = [cell for cell in cells if cell["ratios"]["dense_medium"]["median"] < 1]
    shares = [
        cell["ratios"]["dense_medium"]["median"] / cell["ratios"]["dense"]["median"]
        for cell in cells
    ]
    part = between(statistics.median(shares), min(shares), max(shares))
    return (
        f'At "medium" this machine multiplies in {results["machine"]["medium"]}, and a dense layer '
        f"takes {part} of the time that it takes otherwise. Of {len(cells)} cells it wins "
        f"{len(lost)}.{_worst(lost, 'dense_medium')}"
    )


def _break_even(results: Figures, names: list[str]) -> str:
    """Where dense catches up: a row per layer and batch, a column per block size."""
    layers = {
        ((c["features"][0] * c["features"][1]) ** 0.5, c["batch"]): c["layer"]
        for c in cells_of(results, names)
    }
    threads = max(results["break_even"], key=int, default="")
    found = [
        one for one in results["break_even"].get(threads, []) if (one["n"], one["batch"]) in layers
    ]
    blocks = sorted({one["block"] for one in found})
    by_key = {(one["n"], one["batch"], one["block"]): one for one in found}
    rows = []
    for (n, batch), layer in layers.items():
        row = [layer, f"{batch}"]
        for block in blocks:
            row.append(_break_even_text(by_key.get((n, batch, block))))
        rows.append(row)
    return table(["features", "batch", *[f"block {block}" for block in blocks]], rows)


def _break_even_text(one: Figures | None) -> str:
    if one is None or (not one["crosses"] and one["speedup_there"] > 2):
        return ""  # measured only where dense is far behind
    there = f"{one['speedup_there']:.2f} at {one['densest']:g}"
    if one["density"] is None:
        return f"slower everywhere; {there}"
    if not one["crosses"]:
        return f"above {one['densest']:g}; {there}"
    return f"{one['density']:.2f}; {there}"


def _law(results: Figures, names: list[str]) -> str:
    """The fitted laws beside PopSparse's."""
    head = ["speed-up over", "c", "a (features)", "b (density)", "e (block)", "spread", "cells"]
    rows = []
    for name, law in results["laws"].items():
        # Rounded first: what is a little below zero is zero, not -0.00.
        powers = ["-" if law[key] is None else f"{round(law[key], 2) + 0.0:.2f}" for key in "abe"]
        spread = f"x or / {law['factor']:.2f}, at worst {law['worst']:.2f}"
        rows.append([NAMES[name], f"{law['c']:.2g}", *powers, spread, f"{law['cells']}"])
    published = results["popsparse_law"]
    powers = [f"{published[key]:.2f}" for key in "abe"]
    rows.append(["dense, PopSparse on an IPU (published)", f"{published['c']:g}", *powers, "", ""])
    return table(head, rows)


def _updates(results: Figures, names: list[str]) -> str:
    """Costs in training steps, and the share of an update every 100 steps."""
    cells = cells_of(results, names)
    head, sizes = _sizes(cells)
    rows = []
    for cell in cells:
        extra = {
            key: cell["ratios"]["step_with_update"][key] - 1 for key in ("median", "low", "high")
        }
        shares = [f"{100 * extra[key] / (100 + extra[key]):.1f}" for key in extra]
        parts = [f"{cell['ratios'][name]['median']:.2f}" for name in _PARTS]
        share = f"{shares[0]} % ({shares[1]} to {shares[2]})"
        mark = "\\*" * cell["disturbed"]
        rows.append([*sizes(cell), *parts, f"{_spread(extra)}{mark}", share])
    columns = [*_PARTS.values(), "whole update", "share of training, every 100 steps"]
    return table([*head, *columns], rows) + _notes(results, names, cells)


def _overhead(results: Figures, names: list[str]) -> str:
    """Microseconds a call."""
    cells = cells_of(results, names)
    head, sizes = _sizes(cells)
    rows = []
    for cell in cells:
        own, other = (cell["times"][name]["median"] * 1e6 for name in ("dynsparse", "dense"))
        rows.append([*sizes(cell), f"{own:.1f}", f"{other:.1f}", f"{own - other:.1f}"])
    columns = ["dynsparse, µs", "F.linear in nn.Linear, µs", "difference, µs"]
    return table([*head, *columns], rows) + _notes(results, names, cells)


def _trainings(results: Figures, names: list[str]) -> str:
    """A row per seed: steps, ratio of the times, the part that updates took."""
    rows = []
    cells = cells_of(results, names)
    for cell in cells:
        for found in cell["training"]:
            own, other = (found["contenders"][name] for name in ("dynsparse", "masked"))
            sparsity = f"{100 * (1 - found['density']):.1f} %"
            row = [cell["layer"], sparsity, f"{cell['block']}", f"{found['seed']}"]
            row += [_steps(own, found), _steps(other, found)]
            reached = own["seconds"] and other["seconds"]
            row.append(f"{other['seconds'] / own['seconds']:.1f}" if reached else "")
            share = own["update_seconds"] / own["curve"][-1][1]
            row.append(f"{own['updates']} ({100 * share:.1f} % of the time)")
            rows.append(row)
    head = ["network", "sparsity", "block", "seed", "steps, dynsparse", "steps, masked dense",
            "masked dense's time / dynsparse's", "updates"]  # fmt: skip
    return table(head, rows) + _notes(results, names, cells)


def _steps(run: Figures, found: Figures) -> str:
    if run["steps"] is None:
        return f"not within {run['curve'][-1][0]}"
    return f"{run['steps']}"


def _command(results: Figures, names: list[str]) -> str:
    """What a command printed or wrote, as it is."""
    texts = []
    for name in names:
        benchmark = results["benchmarks"][name]
        texts.append(str(benchmark.get("output") or benchmark.get("figures")))
    return "\n\n".join(f"```\n{text.rstrip()}\n```" for text in texts)


def measured_line(results: Figures, names: list[str]) -> str:
    """When, where and with what: of the benchmarks `names`, or of all."""
    found = [results["benchmarks"][name] for name in names] or results["benchmarks"].values()
    days = sorted({benchmark["measured"] for benchmark in found})
    when = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "never"
    note = f" {results['note']}" if results.get("note") else ""
    return f"Measured {when} on: {machine_line(results)}{note}"


def _of_models(make: Callable[[list[Figures]], Table]) -> Callable[[Figures, list[str]], str]:
    def view(results: Figures, names: list[str]) -> str:
        cells = cells_of(results, names)
        return table(*make(cells)) + _notes(results, names, cells)

    return view


VIEWS: dict[str, Callable[[Figures, list[str]], str]] = {
    "speed-up": _speedups,
    "summary": _summary,
    "losses": _losses,
    "medium": _medium,
    "break-even": _break_even,
    "law": _law,
    "updates": _updates,
    "overhead": _overhead,
    "training": _trainings,
    "models": _of_models(steps_table),
    "parts": _of_models(parts_table),
    "model-memory": _of_models(memory_table),
    "command": _command,
    "machine": measured_line,
}
"""What can be shown of benchmarks: view(results, names) -> Markdown."""

_VIEW_OF = {
    "step": "speed-up",
    "forward": "speed-up",
    "network": "speed-up",
    "update": "updates",
    "training": "training",
    "model": "models",
    "model-memory": "model-memory",
    None: "command",
}


def whole_report(results: Figures) -> str:
    """Everything in the results, a section per benchmark."""
    parts = ["# dynsparse bench", measured_line(results, [])]
    for name, benchmark in results["benchmarks"].items():
        view = _VIEW_OF[benchmark.get("measure")]
        parts += [f"## {name}", benchmark["about"], VIEWS[view](results, [name])]
    if results["laws"]:
        parts += ["## The law", _law(results, [])]
    return "\n\n".join(parts) + "\n"


def cells_of(results: Figures, names: list[str]) -> list[Figures]:
    return [cell for name in names for cell in results["benchmarks"][name]["cells"]]
