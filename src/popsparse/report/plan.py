"""The plan and why it won, from `plan_report` of a sparse plan or `to_dict` of a dense one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from popsparse.report.format import bar, cell, legend, number, percent, say, table, words
from popsparse.report.plain import amount, need

# What is not the cut of a runner-up.
_OF_RUNNERS_UP = (
    "method", "grad_w_exchange_buckets", "cycles", "temporary_bytes", "behind", "why", "passes",
    "terms",
)  # fmt: skip
# Of plans without passes; what has no label here is called by its own name.
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
    "temporary_bytes": "Temporary memory of a tile, B",
    "resident_bytes": "Operands of a tile, B",
}
_OWN_PLACE = ("cycles", "seconds", "tflops")  # In the summary.

_MEMORY = (("buckets", "c0"), ("operands", "c1"), ("temporary", "c2"), ("code", "c3"))


def plan_section(plan: Mapping[str, Any]) -> str:
    """The section of either kind of plan; of the second also one for each pass, by name.

    Raises:
        TypeError, ValueError: neither kind.
    """
    if "plan" in plan and "passes" in plan:
        return _sparse(plan)
    if "terms" in plan:
        return _flat(plan)
    if plan and all(isinstance(one, Mapping) and "terms" in one for one in plan.values()):
        return "".join(
            f'<h3 class="pass">{say(words(n)).capitalize()}</h3>{_flat(p)}' for n, p in plan.items()
        )
    keys = ", ".join(map(str, list(plan)[:8])) or "nothing"
    raise ValueError(
        f"plan must be what plan_report or DensePlan.to_dict gives, with 'passes' or 'terms', "
        f"got {keys}"
    )


def _facts(facts: list[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<div><dt>{say(k)}</dt><dd>{v}</dd></div>" for k, v in facts) + "</dl>"


def _terms(terms: Sequence[tuple[str, float, float | None]]) -> str:
    """Cycles by term, with the temporary bytes where they are known."""
    total = sum(cycles for _, cycles, _ in terms)
    most = max((cycles for _, cycles, _ in terms), default=0)
    with_bytes = any(size is not None for _, _, size in terms)
    head = [("term", ""), ("cycles", "n"), ("share", "n"), ("", "b")]
    head += [("temporary memory, B", "n")] if with_bytes else []
    rows = []
    for name, cycles, size in terms:
        row = cell(say(words(name))) + cell(number(cycles), "n") + cell(percent(cycles, total), "n")
        row += cell(bar([("compute", cycles)], most), "b")
        rows.append(row + (cell(number(size or 0), "n") if with_bytes else ""))
    last = cell("all") + cell(number(total), "n") + "<td></td>" * (len(head) - 2)
    return table(head, [*rows, f'<tr class="total">{last}</tr>'])


def _sparse(report: Mapping[str, Any]) -> str:
    chosen = need(report, "plan", "plan report")
    buckets, search = report.get("buckets"), report.get("search")
    parts = [int(need(chosen, key, "plan report, plan")) for key in ("x", "y", "z")]
    groups = int(chosen.get("groups", 1))
    split = " × ".join(f"{size:,}" for size in parts)
    facts = [
        (
            "Partition X × Y × Z",
            f"<b>{split}</b>" + (f" in {groups:,} groups" if groups > 1 else ""),
        ),
        ("Tiles used", number(need(chosen, "tiles", "plan report, plan"))),
        ("Method", say(need(chosen, "method", "plan report, plan"))),
    ]
    for key, label in (
        ("elements_per_tile", "Work of a tile (out × in × batch)"),
        ("grain", "Grain (out × in × batch)"),
        ("block", "Block of the plan"),
    ):
        if chosen.get(key):
            facts.append((label, " × ".join(number(size) for size in chosen[key])))
    if buckets:
        meta = buckets.get("forward_words", 0) + buckets.get("grad_input_words", 0)
        size = f"{number(buckets['nz_elements'])} values, {number(meta)} words of meta-info"
        facts.append(("A bucket holds", size))
    if "grad_weight" in report["passes"]:
        moved = "buckets" if chosen.get("grad_w_exchange_buckets") else "inputs"
        facts.append(("Weight gradient moves", moved))
    out = [_facts(facts)]
    for name, cost in report["passes"].items():
        terms = [
            (str(term["name"]), amount(term["cycles"], f"plan, {name}"), term["temporary_bytes"])
            for term in need(cost, "terms", f"plan report, {name}")
        ]
        out.append(f"<h3>Estimated cost, {say(words(name))}</h3>{_terms(terms)}")
    if report.get("memory"):
        out.append(_memory(report["memory"]))
    if search:
        out.append(
            f"<p>{number(search['partitions'])} partitions were priced in each of "
            f"{number(search['candidates'])} ways to compute; {number(search['allowed'])} plans "
            f"are allowed, {number(search['fitting'])} stay within the memory bound.</p>"
        )
    if report.get("runners_up"):
        out.append(_runners_up(report))
    return "".join(out)


def _memory(memory: Mapping[str, Any]) -> str:
    needed, available = need(memory, "needed", "plan, memory"), memory["available"]
    whole = max(needed, available)
    parts = [(kind, float(memory[key])) for key, kind in _MEMORY]
    keys = [(kind, f"{key} {number(memory[key])} B") for key, kind in _MEMORY]
    fits = "" if memory.get("fits", True) else ' <strong class="warn">does not fit</strong>'
    return (
        "<h3>Memory of the fullest tile, as planned</h3>"
        f'<p class="wide">{bar(parts, whole)}</p>{legend(keys)}'
        f"<p>{number(needed)} of {number(available)} B ({percent(needed, available)}){fits}</p>"
    )


def _runners_up(report: Mapping[str, Any]) -> str:
    others = report["runners_up"]
    cut = [key for key in others[0] if key not in _OF_RUNNERS_UP]
    why = [str(row.get("why", "")) or _why(report, row) for row in others]
    with_why = any(why)
    most = max(abs(row["behind"]) for row in others)
    rows = []
    for row, reason in zip(others, why, strict=True):
        rows.append(
            cell(" × ".join(number(row[key]) for key in cut), "w")
            + cell(say(row.get("method", "")), "w")
            + cell(number(row["cycles"]), "n")
            + cell(f"{100 * row['behind']:+.2f}\u00a0%", "n")
            + cell(bar([("exchange", abs(row["behind"]))], most), "b")
            + cell(number(row["temporary_bytes"]), "n")
            + (cell(say(words(reason)), "t") if with_why else "")
        )
    head = [
        (" × ".join(_LABELS.get(key, words(key)) for key in cut), ""),
        ("method" if others[0].get("method") else "", ""),
        ("cycles", "n"),
        ("behind", "n"),
        ("", "b"),
        ("temporary memory, B", "n"),
        *([("against the winner", "")] if with_why else []),
    ]
    return "<h3>Runners-up</h3>" + table(head, rows)


def _why(report: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """The terms in which a runner-up loses and gains most, where both have terms."""
    if "terms" not in row or "terms" not in report:
        return ""
    mine = report["terms"]
    more = {key: cycles - mine.get(key, 0) for key, cycles in row["terms"].items()}
    ends = {max(more, key=lambda key: more[key]), min(more, key=lambda key: more[key])}
    return ", ".join(f"{more[key]:+,} {key}" for key in more if key in ends and more[key])


def _flat(report: Mapping[str, Any]) -> str:
    """Any plan of one pass: facts, a mapping of terms to cycles; perhaps memory, runners-up."""
    own = report.get("plan")
    facts = []
    for key, value in (own if isinstance(own, Mapping) else report).items():
        label = _LABELS.get(key, words(str(key)).capitalize())
        if isinstance(value, bool):
            facts.append((label, "yes" if value else "no"))
        elif isinstance(value, (int, float)) and key not in _OWN_PLACE:
            facts.append((label, number(value)))
        elif isinstance(value, str):
            facts.append((label, say(value)))
        elif isinstance(value, (list, tuple)):
            facts.append((label, " to ".join(number(one) for one in value)))
    terms = [(str(k), amount(v, f"plan, {k}"), None) for k, v in report["terms"].items()]
    out = [_facts(facts), "<h3>Estimated cost</h3>", _terms(terms)]
    if report.get("memory"):
        out.append(_memory(report["memory"]))
    if report.get("runners_up"):
        out.append(_runners_up(report))
    return "".join(out)
