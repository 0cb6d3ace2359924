"""A plan for people: terms, memory of a tile, runners-up.

The planner bounds temporary data only, and doubles its bound beyond the tile when it finds
nothing. What also has to fit: the buckets, each tile's share of the dense operands, and code: see
section 5.5 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dynsparse.typed import typed
from popsparse.planning.plan import Plan

CODE_BYTES = 80_000
"""Vertex code, control code and exchange programs of a tile that works on one product. Of this
order in published profiles; 60 to 100 thousand changes no result here by more than one batch
size."""


@dataclass(frozen=True)
class TileMemory:
    """Bytes of the fullest tile.

    `buckets`: values and meta-info; `operands`: its share of input and output; `temporary`: the
    planner's estimate; `code`; `available`: what the tile has.
    """

    buckets: int
    operands: int
    temporary: int
    code: int
    available: int

    @property
    def needed(self) -> int:
        return self.buckets + self.operands + self.temporary + self.code

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def to_dict(self) -> dict[str, Any]:
        return {
            "buckets": self.buckets,
            "operands": self.operands,
            "temporary": self.temporary,
            "code": self.code,
            "needed": self.needed,
            "available": self.available,
            "fits": self.fits,
        }


@typed
def tile_memory(plan: Plan) -> TileMemory:
    """The memory a plan needs on the fullest tile. A tile too small for `CODE_BYTES` many times
    over, as small targets of tests are, is charged an eighth of its memory for code."""
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


def require_fit(plan: Plan) -> None:
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
def plan_report(plan: Plan) -> dict[str, Any]:
    """Everything about a plan as plain numbers and strings, ready for JSON.

    Keys: "plan" (partition, method, ...), "buckets", "passes" (cycles and temporary bytes by
    term), "cycles", "memory" (physical, and the bounds tried), "search" (how many partitions were
    priced) and "runners_up" (each with what it costs more and in which terms).
    """
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


def _table(rows: Iterable[tuple[str, ...]], words: tuple[int, ...] = (0,)) -> list[str]:
    """Aligned columns: those of `words` to the left, the others, numbers, to the right."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


@typed
def plan_text(plan: Plan, runners_up: int = 5) -> str:
    """The report for a terminal: partition, cost by pass and term, memory, runners-up."""
    report = plan_report(plan)
    chosen, search, memory = report["plan"], report["search"], report["memory"]
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
    bound = memory["bound"]
    limit = f"bound {bound:,} B" if bound is not None else "without bound: nothing fitted one"
    lines.append(f"Memory of a tile: temporary {memory['temporary']:,} B ({limit})")
    lines += _table(
        (key, f"{memory[key]:,} B")
        for key in ("buckets", "operands", "temporary", "code", "needed", "available")
    )
    if not memory["fits"]:
        lines.append("  does NOT fit: use a smaller batch or more tiles")
    lines += [
        "",
        f"Search: {search['partitions']:,} partitions x {search['candidates']} candidates, "
        f"{search['allowed']:,} allowed, {search['fitting']:,} within memory",
    ]
    rows = [
        (
            f"x={row['x']} y={row['y']} z={row['z']} {row['method']}",
            f"{row['cycles']:,}",
            f"{row['behind']:+.2%}",
            f"{row['temporary_bytes']:,} B",
            row["why"],
        )
        for row in report["runners_up"][:runners_up]
    ]
    if rows:
        lines.append("Runners-up:")
        lines += _table(rows, words=(0, 4))
    return "\n".join(lines)
