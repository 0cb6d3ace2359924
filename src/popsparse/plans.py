"""Readable reports of plans: time, memory of a tile, terms, runners-up.

The planner bounds temporary data only, and doubles its bound beyond the tile when no plan fits.
The buckets, each tile's share of the dense operands, and code also have to fit: see
section 5.5 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from dynsparse._core.checks import check_types
from popsparse import static_timing, timing
from popsparse.planning.dense import DensePlan
from popsparse.planning.params import ceil_div
from popsparse.planning.plan import Plan, TileMemory
from popsparse.planning.static_layout import StaticPlan
from popsparse.timing import PassTime

CODE_BYTES = 80_000
"""Bytes of vertex code, control code and exchange programs on a tile that works on one product.
Published profiles show this order of magnitude; 60 to 100 thousand changes no result here by more
than one batch size."""


@overload
def predict(plan: StaticPlan) -> PassTime: ...
@overload
def predict(plan: Plan, pattern: Any) -> dict[str, PassTime]: ...
@check_types
def predict(plan: Plan | StaticPlan, pattern: Any = None) -> dict[str, PassTime] | PassTime:
    """Predict the time of each pass of a plan, by name; of a static plan, the time of its one pass.

    Args:
        plan: a plan of `make_plan`, `matmul_plan` or `static.make_plan`.
        pattern: a `SparsePattern` of the plan's shape and block size; for several groups a
            sequence of them. A static plan has its own.

    Raises:
        ValueError: a pattern of another shape or block size, or one whose buckets overflow.
    """
    if isinstance(plan, StaticPlan):
        return static_timing.predict(plan)
    return timing.predict(plan, pattern)


@check_types
def tile_memory(plan: Plan | StaticPlan) -> TileMemory:
    """The memory a plan needs on the fullest tile.

    Code of a static plan is counted; that of a dynamic plan is `CODE_BYTES`, or an eighth of a
    small tile, as in test targets.
    """
    if isinstance(plan, StaticPlan):
        return static_timing.tile_memory(plan)
    sizes = plan.sizes
    dense = sizes.groups * (sizes.x + sizes.y) * sizes.z * plan.dtype.size
    available = int(plan.target.bytes_per_tile)
    return TileMemory(
        buckets=plan.buckets.nz_elements * plan.dtype.size
        + 2 * (plan.buckets.words + plan.buckets.overflow_words),
        operands=ceil_div(dense, plan.tiles_used),
        temporary=plan.temporary_bytes,
        code=min(CODE_BYTES, available // 8),
        available=available,
    )


def _runner_up(row: dict[str, Any], cycles: float, winner: dict[str, int]) -> dict[str, Any]:
    """A plan of the search with its extra cost, and the terms in which it loses and gains most
    against the winner."""
    terms = row["terms"]
    changes = {term: terms.get(term, 0) - winner.get(term, 0) for term in {**winner, **terms}}
    most, least = (end(changes, key=lambda term: changes[term]) for end in (max, min))
    why = [f"{changes[most]:+,} {most}"] if changes[most] > 0 else []
    why += [f"{changes[least]:+,} {least}"] if changes[least] < 0 else []
    fields = {key: value for key, value in row.items() if key != "terms"}
    behind = (row["cycles"] - cycles) / max(cycles, 1)
    return {**fields, "behind": behind, "why": ", ".join(why) or "costs the same"}


@check_types
def plan_report(plan: Plan | StaticPlan | DensePlan) -> dict[str, Any]:
    """A report of a plan as plain numbers and strings, ready for JSON.

    Keys: "plan" (partition, method, ...), "cycles", "memory" (physical, and the bounds tried),
    "search" (how many partitions were priced) and "runners_up" (each with its extra cost). A
    dynamic plan adds "buckets" and "passes" (cycles and temporary bytes by term), a static plan
    "terms", "temporary_bytes" and "predicted" (the execution model's time). A dense plan has the
    keys of `DensePlan.to_dict`.
    """
    if isinstance(plan, DensePlan):
        return plan.to_dict()
    return _static_report(plan) if isinstance(plan, StaticPlan) else _dynamic_report(plan)


def _dynamic_report(plan: Plan) -> dict[str, Any]:
    parts, grain = plan.partition, plan.grouping
    passes = {
        name: {
            "cycles": cost.cycles,
            "temporary_bytes": cost.temporary_bytes,
            "terms": [term._asdict() for term in cost.terms],
        }
        for name, cost in plan.costs.items()
    }
    return {
        "plan": {
            "groups": parts.groups,
            "x": parts.x,
            "y": parts.y,
            "z": parts.z,
            "tiles": plan.tiles_used,
            "method": plan.method.value,
            "grain": [grain.x, grain.y, grain.z],
            "block": list(plan.block_dimensions),
            "shared_buckets": plan.shared_buckets,
            "grad_w_exchange_buckets": plan.grad_w_exchange_buckets,
            "use_dense": plan.use_dense,
            "elements_per_tile": list(plan.elements_per_tile[1:]),
        },
        "buckets": plan.buckets._asdict(),
        "passes": passes,
        "cycles": plan.cycles,
        "memory": {
            **tile_memory(plan).to_dict(),
            "bounds_tried": list(plan.search.bounds),
            "bound": plan.memory_bound,
        },
        "search": plan.search.counts,
        "runners_up": [
            _runner_up(row, plan.cycles, plan.cycles_by_term) for row in plan.search.runners_up
        ],
    }


def _static_report(plan: StaticPlan) -> dict[str, Any]:
    pieces = [plan.pieces(part) for part in range(plan.n_split)]
    ranges = {
        name: [
            int(min((getattr(p, name).min() for p in pieces if len(p)), default=0)),
            int(max((getattr(p, name).max() for p in pieces if len(p)), default=0)),
        ]
        for name in ("blocks", "rows", "columns")
    }
    return {
        "plan": {
            "method": "static",
            "n_split": plan.n_split,
            "bands": plan.num_bands,
            "tiles": plan.tiles_used,
            "block": plan.pattern.block_size,
            "n_padded": plan.n_padded,
            "planned_rows": plan.planned[0],
            "planned_columns": plan.planned[1],
            **{f"{name}_per_tile": span for name, span in ranges.items()},
        },
        "terms": dict(plan.terms),
        "cycles": plan.cycles,
        "temporary_bytes": plan.temporary_bytes,
        "memory": {**tile_memory(plan).to_dict(), "bound": plan.search.bounds[-1]},
        "search": plan.search.counts,
        "runners_up": [_runner_up(row, plan.cycles, plan.terms) for row in plan.search.runners_up],
        "predicted": predict(plan).to_dict(),
    }


def text_table(rows: Iterable[tuple[str, ...]], words: tuple[int, ...] = (0,)) -> list[str]:
    """Align columns: those in `words` left, the others, numbers, right."""
    rows = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@check_types
def plan_text(plan: Plan | StaticPlan | DensePlan, runners_up: int = 5) -> str:
    """The report as text for a terminal: the cut, cycles by pass and term, memory, runners-up."""
    report = plan_report(plan)
    facts = report.get("plan", report)
    between = " to " if isinstance(plan, StaticPlan) else " x "
    shown = {
        name.replace("_", " "): between.join(map(str, value)) if isinstance(value, list) else value
        for name, value in facts.items()
        if not isinstance(value, (dict, float))
    }
    lines = [f"{_title(plan)} on {plan.target.name}"]
    lines += text_table(((name, str(value)) for name, value in shown.items()), words=(0, 1))
    terms = [{"name": name, "cycles": cycles} for name, cycles in report.get("terms", {}).items()]
    passes = report.get("passes", {"product": {"cycles": report["cycles"], "terms": terms}})
    for name, cost in passes.items():
        lines += ["", f"{name}: {cost['cycles']:,} cycles estimated"]
        lines += text_table(
            (
                term["name"],
                f"{term['cycles']:,}",
                f"{term['cycles'] / max(cost['cycles'], 1):.1%}",
                f"{term['temporary_bytes']:,} B" if "temporary_bytes" in term else "",
            )
            for term in cost["terms"]
        )
    if "predicted" in report:
        time = report["predicted"]
        lines.append(f"Predicted: {time['cycles']:,.0f} cycles, {time['tflops']:.2f} TFLOP/s")
    if "memory" in report:
        lines += _memory_lines(report["memory"])
    if "search" in report:
        counts = ", ".join(f"{count:,} {what}" for what, count in report["search"].items())
        lines += ["", f"Search: {counts}"]
    rows = report.get("runners_up", [])[:runners_up]
    if rows:
        lines += ["Runners-up:", *text_table(map(_runner_up_cells, rows), words=(0, 4))]
    return "\n".join(lines)


def _title(plan: Plan | StaticPlan | DensePlan) -> str:
    if isinstance(plan, DensePlan):
        return f"Dense plan: {plan.m} x {plan.k} times {plan.k} x {plan.n}, {plan.dtype},"
    if isinstance(plan, StaticPlan):
        p = plan.params
        shape = f"dense {p.n} x {p.k} times sparse {p.k} x {p.m}"
        if not p.transposed:
            shape = f"sparse {p.m} x {p.k} times dense {p.k} x {p.n}"
        return f"Static plan: {shape}, {plan.dtype},"
    return "Plan"


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    bound = memory["bound"]
    limit = f"bound {bound:,} B" if bound is not None else "without bound: nothing fitted one"
    kinds = ("buckets", "operands", "temporary", "code", "needed", "available")
    lines = ["", f"Memory of a tile: temporary {memory['temporary']:,} B ({limit})"]
    lines += text_table((kind, f"{memory[kind]:,} B") for kind in kinds)
    if not memory["fits"]:
        lines.append("  does NOT fit: use a smaller batch or more tiles")
    return lines


def _runner_up_cells(row: dict[str, Any]) -> tuple[str, ...]:
    figures = ("cycles", "behind", "temporary_bytes", "why")
    cut = " ".join(f"{key}={value}" for key, value in row.items() if key not in figures)
    numbers = (f"{row['cycles']:,}", f"{row['behind']:+.2%}", f"{row['temporary_bytes']:,} B")
    return (cut, *numbers, row["why"])
