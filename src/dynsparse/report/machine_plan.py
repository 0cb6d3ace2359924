"""The plan and why it won, from `plan_report` of a sparse plan or `to_dict` of a dense one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynsparse.report.machine_data import amount, need
from dynsparse.report.machine_format import bar, cell, legend, number, percent, say, table, words

__all__ = ["plan_section"]

# Of plans without passes; what has no label here is called by its own name.
_LABELS = {
    "field": "Tiles along the streamed field",
    "out": "Tiles along the out-channels",
    "in": "Tiles along the in-channels",
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
        return _dense(plan)
    if plan and all(isinstance(one, Mapping) and "terms" in one for one in plan.values()):
        return "".join(f"<h3>{say(words(n)).capitalize()}</h3>{_dense(p)}" for n, p in plan.items())
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
            f"<p>{number(search['partitions'])} partitions were priced for each of "
            f"{number(search['candidates'])} methods; {number(search['allowed'])} plans are "
            f"allowed, {number(search['fitting'])} stay within the memory bound.</p>"
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
    rows = []
    most = max(abs(row["behind"]) for row in report["runners_up"])
    for row in report["runners_up"]:
        sizes = " × ".join(number(row[key]) for key in ("x", "y", "z"))
        rows.append(
            cell(sizes, "w")
            + cell(say(row["method"]), "w")
            + cell(number(row["cycles"]), "n")
            + cell(f"{100 * row['behind']:+.2f} %", "n")
            + cell(bar([("exchange", abs(row["behind"]))], most), "b")
            + cell(number(row["temporary_bytes"]), "n")
            + cell(say(words(row["why"])))
        )
    head = [
        ("X × Y × Z", ""),
        ("method", ""),
        ("cycles", "n"),
        ("behind", "n"),
        ("", "b"),
        ("temporary memory, B", "n"),
        ("against the winner", ""),
    ]
    return "<h3>Runners-up</h3>" + table(head, rows)


def _dense(plan: Mapping[str, Any]) -> str:
    """Any plan that is a list of facts and a mapping of terms to cycles."""
    facts = []
    for key, value in plan.items():
        label = _LABELS.get(key, words(str(key)).capitalize())
        if isinstance(value, bool):
            facts.append((label, "yes" if value else "no"))
        elif isinstance(value, (int, float)) and key not in _OWN_PLACE:
            facts.append((label, number(value)))
        elif isinstance(value, str):
            facts.append((label, say(value)))
    terms = [(str(k), amount(v, f"plan, {k}"), None) for k, v in plan["terms"].items()]
    return _facts(facts) + "<h3>Estimated cost</h3>" + _terms(terms)
