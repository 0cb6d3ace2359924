"""Whether a plan physically fits a tile, which the planner's memory bound does not say.

The planner bounds temporary data only, and doubles its bound beyond the tile when it finds
nothing. What also has to fit: the buckets, each tile's share of the dense operands, and code: see
section 5.5 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

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
