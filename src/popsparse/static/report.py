"""Why a static plan won, for people and as plain numbers."""

from __future__ import annotations

from typing import Any

from popsparse.static.layout import StaticPlan
from popsparse.static.memory import tile_memory
from popsparse.static.model import predict


def plan_report(plan: StaticPlan) -> dict[str, Any]:
    """A plan as plain numbers and strings, ready for JSON.

    Keys: "plan" (splits, what a tile has), "terms" and "cycles" (the planner's estimate), "memory",
    "search", "runners_up" (with what they cost more), "predicted" (the execution model's time).
    """
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
            **{f"{name}_per_tile": found for name, found in ranges.items()},
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


def plan_text(plan: StaticPlan, runners_up: int = 5) -> str:
    """The report for a terminal."""
    report = plan_report(plan)
    chosen, memory, time = report["plan"], report["memory"], report["predicted"]
    p = plan.params
    shape = f"dense {p.n} x {p.k} times sparse {p.k} x {p.m}"
    if not p.transposed:
        shape = f"sparse {p.m} x {p.k} times dense {p.k} x {p.n}"
    lines = [
        f"Static plan on {plan.target.name}: {shape}, {plan.dtype}, blocks of {chosen['block']}",
        f"  {chosen['n_split']} parts of n, {chosen['bands']} column bands, "
        f"{chosen['tiles']} of {plan.target.tiles} tiles",
        "  a tile has "
        + ", ".join(
            f"{low:,} to {high:,} {what}"
            for what in ("blocks", "rows", "columns")
            for low, high in [chosen[f"{what}_per_tile"]]
        ),
        "",
        f"Planned: {plan.cycles:,} cycles",
        *(
            f"  {name:<22}{cycles:>12,}{cycles / max(plan.cycles, 1):>8.1%}"
            for name, cycles in plan.terms.items()
            if cycles
        ),
        "",
        f"Predicted: {time['cycles']:,.0f} cycles, {time['tflops']:.2f} TFLOP/s",
        *(
            f"  {step['name']:<22}{step['compute'] + step['exchange']:>12,.0f}"
            for step in time["steps"]
        ),
        f"  {'synchronisation':<22}{time['sync_cycles']:>12,.0f}",
        "",
        f"Memory of a tile: temporary {plan.temporary_bytes:,} B planned "
        f"(bound {memory['bound']:,} B)",
        *(
            f"  {key:<22}{memory[key]:>12,} B"
            for key in ("buckets", "operands", "temporary", "code", "needed", "available")
        ),
    ]
    if not memory["fits"]:
        lines.append("  does NOT fit: use a smaller n or more tiles")
    search = report["search"]
    lines += ["", f"Search: {search['partitions']:,} priced, {search['possible']:,} possible"]
    if rows := report["runners_up"][:runners_up]:
        lines.append("Runners-up:")
        lines += [
            f"  n_split={row['n_split']} bands={row['bands']:<5}{row['cycles']:>12,}"
            f"{row['behind']:>+9.2%}{row['temporary_bytes']:>12,} B"
            for row in rows
        ]
    return "\n".join(lines)
