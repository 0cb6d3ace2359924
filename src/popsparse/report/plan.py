"""The summary and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from popsparse.report.charts import (
    bar,
    esc,
    legend,
    number,
    percent,
    table,
    words,
)

# Keys that are not part of the cut of a runner-up.
_OF_RUNNERS_UP = (
    "method", "grad_w_exchange_buckets", "cycles", "temporary_bytes", "behind", "why",
)  # fmt: skip
# Labels of plans without passes; other keys appear under their own names.
_LABELS = {
    "field": "Tiles along the streamed field",
    "out": "Tiles along the out-channels",
    "in": "Tiles along the in-channels",
    "x": "X",
    "y": "Y",
    "z": "Z",
    "n_split": "Parts of n",
    "bands": "Column bands",
    "swapped": "Left operand stationary",
    "tiles": "Tiles used",
    "phases": "Supersteps",
    "sync_cycles": "Synchronisation, cycles",
    "elements_per_tile": "Work of a tile (out × in × batch)",
    "grain": "Grain (out × in × batch)",
    "block": "Block of the plan",
    "temporary_bytes": "Temporary memory of a tile, B",
    "resident_bytes": "Operands of a tile, B",
}
_OWN_PLACE = ("cycles", "seconds", "tflops")  # In the summary.

_WHAT_A_PLAN_IS = (
    "<p>A plan cuts the product into X parts of the rows, Y of the columns and Z of the batch, one "
    "for each tile. The planner estimates what every cut costs and takes the cheapest for all the "
    "passes listed here together, as they share the weights, even where a run computes only one of "
    "them.</p>"
)

_MEMORY = (("buckets", "c0"), ("operands", "c1"), ("temporary", "c2"), ("code", "c3"))


def render_plan(plan: Mapping[str, Any]) -> str:
    """The section of a plan; of plans by pass, one for each.

    Raises:
        TypeError, ValueError: not a plan.
    """
    if "passes" in plan or "terms" in plan:
        return _render_plan(plan)
    if plan and all(isinstance(entry, Mapping) and "terms" in entry for entry in plan.values()):
        return "".join(
            f'<h3 class="pass">{esc(words(n)).capitalize()}</h3>{_render_plan(p)}'
            for n, p in plan.items()
        )
    keys = ", ".join(map(str, list(plan)[:8])) or "nothing"
    raise ValueError(
        f"plan must be what plan_report or DensePlan.to_dict gives, with 'passes' or 'terms', "
        f"got {keys}"
    )


def _render_plan(report: Mapping[str, Any]) -> str:
    """Facts, the cost of each pass by term, and memory, search and runners-up if present."""
    facts = []
    chosen = dict(report.get("plan", report))
    if "passes" in report:
        split = " × ".join(number(chosen.pop(dim)) for dim in "xyz")
        facts.append(("Partition X × Y × Z", f"<b>{split}</b>"))
    for key, value in chosen.items():
        label = _LABELS.get(key, words(str(key)).capitalize())
        if isinstance(value, bool):
            facts.append((label, "yes" if value else "no"))
        elif isinstance(value, (int, float)) and key not in _OWN_PLACE:
            facts.append((label, number(value)))
        elif isinstance(value, str):
            facts.append((label, esc(value)))
        elif isinstance(value, (list, tuple)):
            is_range = key.endswith("_per_tile") and len(value) == 2
            between = " to " if is_range else " × "
            facts.append((label, between.join(number(entry) for entry in value)))
    if buckets := report.get("buckets"):
        meta = buckets["forward_words"] + buckets["grad_input_words"]
        size = f"{number(buckets['nz_elements'])} values, {number(meta)} words of meta-info"
        facts.append(("A bucket holds", size))
    out = [_render_facts(facts)]
    if "passes" in report:
        out.insert(0, _WHAT_A_PLAN_IS)
    for name, cost in report.get("passes", {}).items():
        terms = [(t["name"], float(t["cycles"]), t["temporary_bytes"]) for t in cost["terms"]]
        out.append(f"<h3>Estimated cost, {esc(words(name))}</h3>{_render_terms(terms)}")
    if "terms" in report:
        rows = [(str(name), float(cycles), None) for name, cycles in report["terms"].items()]
        out.append(f"<h3>Estimated cost</h3>{_render_terms(rows)}")
    if memory := report.get("memory"):
        out.append(_render_memory(memory))
    if search := report.get("search"):
        out.append(f"<p>{_describe_search(search)}</p>")
    if runners_up := report.get("runners_up"):
        out.append(_render_runners_up(runners_up))
    return "".join(out)


def _describe_search(search: Mapping[str, Any]) -> str:
    """The number of plans compared; other counts are listed by name."""
    if not {"partitions", "candidates", "allowed", "fitting"} <= search.keys():
        listed = (f"{number(count)} {esc(words(what))}" for what, count in search.items())
        return f"The search: {', '.join(listed)}."
    count = {name: number(search[name]) for name in search}
    return (
        f"The search compared {count['partitions']} cuts, each with {count['candidates']} ways to "
        f"compute: {count['allowed']} suit the sizes and options, and {count['fitting']} of these "
        "stay within the temporary memory that is allowed."
    )


def _render_facts(facts: list[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{esc(k)}</dt><dd>{v}</dd></div>" for k, v in facts) + "</dl>"


def _render_terms(terms: Sequence[tuple[str, float, float | None]]) -> str:
    """Cycles by term, with the temporary bytes if known."""
    total = sum(cycles for _, cycles, _ in terms)
    most = max((cycles for _, cycles, _ in terms), default=0)
    with_bytes = any(size is not None for _, _, size in terms)
    head = ["term", "#cycles", "#share", "=", "#temporary memory, B"]
    rows: list[tuple[str, list[Any]]] = []
    for name, cycles, size in terms:
        share, shown = percent(cycles, total), bar([("compute", cycles)], most)
        rows.append(("", [esc(words(name)), cycles, share, shown, size or 0]))
    rows.append(("total", ["all", total, None, None, None]))
    if not with_bytes:
        head, rows = head[:-1], [(kind, cells[:-1]) for kind, cells in rows]
    return table(head, rows)


def _render_memory(memory: Mapping[str, Any]) -> str:
    needed, available = memory["needed"], memory["available"]
    total = max(needed, available)
    parts = [(kind, float(memory[key])) for key, kind in _MEMORY]
    keys = [(kind, f"{key} {number(memory[key])} B") for key, kind in _MEMORY]
    fits = "" if memory["fits"] else ' <strong class="warn">does not fit</strong>'
    return (
        "<h3>Memory of the fullest tile, as planned</h3>"
        f'<p class="wide">{bar(parts, total)}</p>{legend(keys)}'
        f"<p>{number(needed)} of {number(available)} B ({percent(needed, available)}){fits}</p>"
    )


def _render_runners_up(runners_up: Sequence[Mapping[str, Any]]) -> str:
    cut = [key for key in runners_up[0] if key not in _OF_RUNNERS_UP]
    most = max(abs(row["behind"]) for row in runners_up)
    head: list[str | tuple[str, str]] = [
        (" × ".join(_LABELS.get(key, words(key)) for key in cut), "w"),
        ("method" if runners_up[0].get("method") else "", "w"),
        "#cycles",
        "#behind",
        "=",
        "#temporary memory, B",
        ("against the winner", "t"),
    ]
    rows = (
        [
            " × ".join(number(row[key]) for key in cut),
            esc(row.get("method", "")),
            row["cycles"],
            f"{100 * row['behind']:+.2f}\u00a0%",
            bar([("exchange", abs(row["behind"]))], most),
            row["temporary_bytes"],
            esc(words(row["why"])),
        ]
        for row in runners_up
    )
    return "<h3>Runners-up</h3>" + table(head, rows)


def plan_summary(plan: Any) -> dict[str, Any]:
    """The request of a `popsparse.Plan`, as figures for the summary."""
    sizes = plan.sizes
    out = {
        "rows": sizes.x,
        "cols": sizes.y,
        "batch": sizes.z,
        "block_size": plan.params.sparsity_params.block_dimensions,
        "dtype": plan.dtype.name,
        "partials": plan.options.partials_type.name,
        "target": plan.target.name,
        "tiles": plan.target.tiles,
    }
    rows, cols = out["block_size"]
    if rows == cols:
        out["block_size"] = rows
    if sizes.groups > 1:
        out["groups"] = sizes.groups
    return out


# Labels of the summary; other keys appear under their own names. Headlines also have a unit.
_HEADLINES = {
    "cycles": ("Cycles", ""),
    "estimated_cycles": ("Cycles, estimated", ""),
    "seconds": ("Time", "µs"),
    "tflops": ("Throughput", "TFLOP/s"),
    "max_tile_bytes": ("Fullest tile", "B"),
    "propagation_steps": ("Propagation steps", ""),
    "max_relative_error": ("Largest relative error", ""),
}
_SUMMARY_LABELS = {
    "rows": "Rows (m)",
    "cols": "Columns (k)",
    "batch": "Batch (n)",
    "dtype": "Data type",
    "partials": "Partial sums",
    "tiles": "Tiles of the target",
    "nnz": "Non-zero values",
    "spilled": "Blocks spilled",
    "propagated": "Blocks propagated",
}


def _value(key: str, value: Any, unit: str) -> str:
    """One figure as HTML."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float, np.number)):
        if key == "density":
            value = float(value)
            one_in = 1 / value if value else 0.0
            exact = abs(one_in - round(one_in)) < 1e-9 and one_in > 1
            return f"{100 * value:.4g} %" + (f" (1/{round(one_in)})" if exact else "")
        if key == "seconds":
            value = value * 1e6
        if key == "max_relative_error":
            return f"{value:.3g}"
        after = f" <small>{esc(unit)}</small>" if unit else ""
        # A seed is a name, so it has no thousands separators.
        return (str(value) if key == "seed" else number(float(value))) + after
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_value("", entry, "") for entry in value)
    return esc(value)


def render_summary(summary: Mapping[str, Any]) -> str:
    """Headlines as cards, the rest as a list. Unknown keys are shown unchanged."""
    cards, rest = [], []
    for key, value in summary.items():
        by_pass = value if isinstance(value, Mapping) else {"": value}
        if key in _HEADLINES and value is not None:
            label, unit = _HEADLINES[key]
            figures = "".join(
                f"<b>{_value(key, entry, unit)}</b>"
                + (f"<em>{esc(words(str(name)))}</em>" if name else "")
                for name, entry in by_pass.items()
            )
            if figures:
                cards.append(f'<div class="card"><h3>{esc(label)}</h3>{figures}</div>')
        elif key not in _HEADLINES and by_pass:
            label = _SUMMARY_LABELS.get(key, words(str(key)).capitalize())
            shown = ", ".join(
                f"{esc(words(str(name)))} {_value(key, entry, '')}".strip()
                for name, entry in by_pass.items()
            )
            rest.append(f"<div><dt>{esc(label)}</dt><dd>{shown}</dd></div>")
    out = f"<dl>{''.join(rest)}</dl>" if rest else ""
    return out + (f'<div class="cards">{"".join(cards)}</div>' if cards else "")
