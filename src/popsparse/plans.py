"""Plans of all products for people: time, memory of a tile, terms, runners-up.

The planner bounds temporary data only, and doubles its bound beyond the tile when it finds
nothing. What also has to fit: the buckets, each tile's share of the dense operands, and code: see
section 5.5 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, overload

from dynsparse.checks import typed
from popsparse import static_timing, timing
from popsparse.planning.dense import DensePlan
from popsparse.planning.plan import Plan, TileMemory
from popsparse.planning.static_layout import StaticPlan
from popsparse.timing import PassTime

CODE_BYTES = 80_000
"""Vertex code, control code and exchange programs of a tile that works on one product. Of this
order in published profiles; 60 to 100 thousand changes no result here by more than one batch
size."""


@overload
def predict(plan: StaticPlan) -> PassTime: ...
@overload
def predict(plan: Plan, pattern: Any) -> dict[str, PassTime]: ...
@typed
def predict(plan: Plan | StaticPlan, pattern: Any = None) -> dict[str, PassTime] | PassTime:
    """The time of each pass a plan is for, by name; of a static plan, which has one, its time.

    Args:
        plan: as `make_plan` or `matmul_plan` give it, or `static.make_plan`.
        pattern: a `SparsePattern` of the plan's shape and block size; for several groups a
            sequence of them. A static plan has its own.

    Raises:
        ValueError: a pattern of another shape or block size, or one whose buckets overflow.
    """
    if isinstance(plan, StaticPlan):
        return static_timing.predict(plan)
    return timing.predict(plan, pattern)


@typed
def tile_memory(plan: Plan | StaticPlan) -> TileMemory:
    """The memory a plan needs on the fullest tile.

    Code of a static plan is counted; that of a dynamic one is `CODE_BYTES`, or an eighth of a tile
    that is small, as targets of tests are.
    """
    if isinstance(plan, StaticPlan):
        return static_timing.tile_memory(plan)
    sizes = plan.sizes
    dense = sizes.groups * (sizes.x + sizes.y) * sizes.z * plan.dtype.size
    available = int(plan.target.bytes_per_tile)
    return TileMemory(
        buckets=plan.buckets.nz_elements * plan.dtype.size
        + 2 * (plan.buckets.words + plan.buckets.overflow_words),
        operands=-(-dense // plan.tiles_used),
        temporary=plan.temporary_bytes,
        code=min(CODE_BYTES, available // 8),
        available=available,
    )


def require_fit(plan: Plan | StaticPlan) -> None:
    """Refuse a plan that cannot fit.

    Raises:
        ValueError: with what it needs, what the tile has and how to mend it.
    """
    memory = tile_memory(plan)
    if not memory.fits:
        raise ValueError(
            f"the best plan needs {memory.needed} bytes a tile ({memory.temporary} of them "
            f"temporary), the target has {memory.available}: use a smaller batch, a lower "
            "available_memory_proportion or more tiles"
        )


def _reason(winner: dict[str, dict[str, int]], other: dict[str, Any], ahead: int) -> str:
    """The terms in which the other plan loses and gains most, in words."""
    changes: dict[str, int] = {}
    for name, terms in other["passes"].items():
        for term, cycles in terms.items():
            before = winner.get(name, {}).get(term, 0)
            changes[f"{name} {term}"] = cycles - before
        for term, cycles in winner.get(name, {}).items():
            if term not in terms:
                changes[f"{name} {term}"] = -cycles
    if not any(changes.values()):
        more = "needs more memory" if ahead == 0 and other["temporary_bytes"] else "comes later"
        return f"costs the same, {more}"
    loses = max(changes, key=lambda key: changes[key])
    gains = min(changes, key=lambda key: changes[key])
    words = [f"{changes[loses]:+,} {loses}"] if changes[loses] > 0 else []
    words += [f"{changes[gains]:+,} {gains}"] if changes[gains] < 0 else []
    return ", ".join(words)


@typed
def plan_report(plan: Plan | StaticPlan | DensePlan) -> dict[str, Any]:
    """Everything about a plan as plain numbers and strings, ready for JSON.

    Keys: "plan" (partition, method, ...), "cycles", "memory" (physical, and the bounds tried),
    "search" (how many partitions were priced) and "runners_up" (each with what it costs more);
    of a dynamic plan "buckets" and "passes" (cycles and temporary bytes by term); of a static one
    "terms", "temporary_bytes" and "predicted" (the execution model's time). Of a dense plan the
    figures of `DensePlan.to_dict`.
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
    winner = {
        name: {term.name: term.cycles for term in cost.terms} for name, cost in plan.costs.items()
    }
    runners_up = []
    for other in plan.search.runners_up:
        behind = other["cycles"] - plan.cycles
        row = {key: value for key, value in other.items() if key != "passes"}
        row["behind"] = behind / plan.cycles
        row["why"] = _reason(winner, other, behind)
        runners_up.append(row)
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
        "search": {
            "partitions": plan.search.partitions,
            "candidates": plan.search.candidates,
            "allowed": plan.search.allowed,
            "fitting": plan.search.fitting,
        },
        "runners_up": runners_up,
    }


def _static_report(plan: StaticPlan) -> dict[str, Any]:
    pieces = [plan.pieces(part) for part in range(plan.n_split)]
    ranges = {
        name: [
            int(min((getattr(p, name).min(initial=1 << 60) for p in pieces if len(p)), default=0)),
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
        "memory": {**tile_memory(plan).to_dict(), "bound": plan.search.bound},
        "search": {"partitions": plan.search.priced, "possible": plan.search.possible},
        "runners_up": [
            {**row, "behind": row["cycles"] / max(plan.cycles, 1) - 1}
            for row in plan.search.runners_up
        ],
        "predicted": predict(plan).to_dict(),
    }


def _table(rows: Iterable[tuple[str, ...]], words: tuple[int, ...] = (0,)) -> list[str]:
    """Aligned columns: those of `words` to the left, the others, numbers, to the right."""
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


@typed
def plan_text(plan: Plan | StaticPlan, runners_up: int = 5) -> str:
    """The report for a terminal: partition, cost by pass and term, memory, runners-up."""
    report = plan_report(plan)
    search, memory, bound = report["search"], report["memory"], report["memory"]["bound"]
    if isinstance(plan, StaticPlan):
        lines, more = _static_lines(plan, report), "n"
        priced = f"{search['partitions']:,} priced, {search['possible']:,} possible"
    else:
        lines, more = _dynamic_lines(plan, report), "batch"
        priced = (
            f"{search['partitions']:,} partitions x {search['candidates']} candidates, "
            f"{search['allowed']:,} allowed, {search['fitting']:,} within memory"
        )
    limit = f"bound {bound:,} B" if bound is not None else "without bound: nothing fitted one"
    lines.append(f"Memory of a tile: temporary {plan.temporary_bytes:,} B ({limit})")
    lines += _table(
        (key, f"{memory[key]:,} B")
        for key in ("buckets", "operands", "temporary", "code", "needed", "available")
    )
    if not memory["fits"]:
        lines.append(f"  does NOT fit: use a smaller {more} or more tiles")
    lines += ["", f"Search: {priced}"]
    rows = [
        (
            f"n_split={row['n_split']} bands={row['bands']}"
            if "bands" in row
            else f"x={row['x']} y={row['y']} z={row['z']} {row['method']}",
            f"{row['cycles']:,}",
            f"{row['behind']:+.2%}",
            f"{row['temporary_bytes']:,} B",
            row.get("why", ""),
        )
        for row in report["runners_up"][:runners_up]
    ]
    if rows:
        lines += ["Runners-up:", *_table(rows, words=(0, 4))]
    return "\n".join(lines)


def _dynamic_lines(plan: Plan, report: dict[str, Any]) -> list[str]:
    chosen = report["plan"]
    groups = f"{chosen['groups']} groups of " if chosen["groups"] > 1 else ""
    lines = [
        f"Plan on {plan.target.name}: {groups}x={chosen['x']} y={chosen['y']} z={chosen['z']}, "
        f"{chosen['tiles']} of {plan.target.tiles} tiles, method {chosen['method']}",
        f"  a tile works on {' x '.join(map(str, chosen['elements_per_tile']))} (out, in, batch) "
        f"in grains of {' x '.join(map(str, chosen['grain']))}",
        f"  a bucket holds {plan.buckets.nz_elements:,} values and {plan.buckets.words:,} words "
        "of meta-info",
        "",
    ]
    for name, cost in report["passes"].items():
        lines.append(f"{name}: {cost['cycles']:,} cycles estimated")
        lines += _table(
            (
                term["name"],
                f"{term['cycles']:,}",
                f"{term['cycles'] / max(cost['cycles'], 1):.1%}",
                f"{term['temporary_bytes']:,} B",
            )
            for term in cost["terms"]
        )
        lines.append("")
    return lines


def _static_lines(plan: StaticPlan, report: dict[str, Any]) -> list[str]:
    chosen, time, p = report["plan"], report["predicted"], plan.params
    shape = f"dense {p.n} x {p.k} times sparse {p.k} x {p.m}"
    if not p.transposed:
        shape = f"sparse {p.m} x {p.k} times dense {p.k} x {p.n}"
    spans = (
        f"{low:,} to {high:,} {what}"
        for what in ("blocks", "rows", "columns")
        for low, high in [chosen[f"{what}_per_tile"]]
    )
    steps = [(step["name"], f"{step['compute'] + step['exchange']:,.0f}") for step in time["steps"]]
    return [
        f"Static plan on {plan.target.name}: {shape}, {plan.dtype}, blocks of {chosen['block']}",
        f"  {chosen['n_split']} parts of n, {chosen['bands']} column bands, "
        f"{chosen['tiles']} of {plan.target.tiles} tiles",
        f"  a tile has {', '.join(spans)}",
        "",
        f"Planned: {plan.cycles:,} cycles",
        *_table(
            (name, f"{cycles:,}", f"{cycles / max(plan.cycles, 1):.1%}")
            for name, cycles in plan.terms.items()
            if cycles
        ),
        "",
        f"Predicted: {time['cycles']:,.0f} cycles, {time['tflops']:.2f} TFLOP/s",
        *_table([*steps, ("synchronisation", f"{time['sync_cycles']:,.0f}")]),
        "",
    ]
