"""What a static plan needs of a tile's memory: data, and code from facts.

Code is counted, not allowed for: vertices, stacks, control code and the instructions that send and
receive, of which sums in many small pieces need most. See docs/popsparse-fidelity.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.machine import facts
from popsparse.machine.memory import REAL_TILE
from popsparse.planning.memory import TileMemory
from popsparse.planning.parts import ceil_div
from popsparse.static.layout import StaticPlan, work_list_words
from popsparse.static.model import column_fragments, predict, reduce_cycles


def tile_memory(plan: StaticPlan) -> TileMemory:
    """The memory of the fullest tile: work list and values (`buckets`), its share of the dense
    operand and the result (`operands`), gathered columns and partial sums (`temporary`), code."""
    size, block = plan.dtype.size, plan.pattern.block_size
    tiles, area = plan.target.tiles, block * block
    lists = temporary = partials = 0
    for part, n in enumerate(plan.n_parts):
        pieces = plan.pieces(part)
        if not len(pieces):
            continue
        words = work_list_words(pieces.rows, pieces.blocks, block, plan.target.workers)
        lists = max(lists, int((2 * words + pieces.blocks * area * size).max()))
        held = (pieces.rows + pieces.columns) * n.size * block * size
        temporary = max(temporary, int(held.max()))
        partials = max(partials, int(pieces.rows.max()) * n.size * block * size)
    if plan.n_split > 1:
        lists += ceil_div(plan.pattern.nnz * area * size, tiles)  # At home, besides.
    sums = plan.sums
    summed = np.bincount(sums.tile, sums.length * (sums.depth + ~sums.at_home), tiles)
    received = int(summed.max()) * size
    operands = ceil_div((plan.params.k + plan.params.m) * plan.n_padded * size, tiles)
    return TileMemory(
        buckets=lists,
        operands=operands,
        temporary=max(temporary, partials + received),
        code=sum(code_bytes(plan).values()),
        available=int(plan.target.bytes_per_tile),
    )


def code_bytes(plan: StaticPlan, which: str = "typical") -> dict[str, int]:
    """Bytes of code and the like on the fullest tile, by what they are.

    Args:
        which: "low", "typical" or "high": the end of the facts' ranges that is taken.
    """

    def fact(name: str) -> float:
        return float(getattr(getattr(facts, name), which))

    found: dict[str, Any] = {
        "vertex code": fact("KERNEL_CODE") + fact("SUM_CODE") * bool(reduce_cycles(plan).any()),
        "vertices of sums": plan.sums.state_bytes(plan).max(),
        "exchange code": exchange_code(plan, which).max(),
    }
    if plan.target.bytes_per_tile >= REAL_TILE:
        steps = len(predict(plan).steps)
        found["control code"] = fact("CONTROL_CODE") * steps + fact("HOST_EXCHANGE")
        found["stacks"] = fact("STACKS")
    return {name: int(size) for name, size in found.items()}


def exchange_code(plan: StaticPlan, which: str = "typical") -> np.ndarray:
    """Bytes of the instructions that send and receive, all exchanges together: [tiles].

    At the high end every receive sets its pointer, since exchanges are not scheduled in the order
    of addresses.
    """
    tiles, size, block = plan.target.tiles, plan.dtype.size, plan.pattern.block_size
    sums, outputs = plan.sums, plan.outputs
    ops = plan.depths.shape
    # Stretches of each row and part of n that its partial sums are sent in.
    cut = np.zeros(ops, np.int64)
    np.add.at(cut, (sums.row, sums.part), sums.depth > 0)
    np.add.at(cut, (outputs.row[sums.ones], outputs.part[sums.ones]), 1)
    receives = np.bincount(sums.tile, sums.depth, tiles)
    receives += np.bincount(outputs.tile[sums.ones], minlength=tiles)
    sends, long = np.zeros(tiles), np.zeros(tiles)
    for part, n in enumerate(plan.n_parts):
        pieces = plan.pieces(part)
        if not len(pieces):
            continue
        at = plan.tile_parts[part].begin + pieces.tile
        columns = column_fragments(plan, pieces) + (plan.n_split > 1)
        receives += np.bincount(at, columns, tiles)
        sends += np.bincount(at[pieces.row_piece], cut[pieces.row, part], tiles)
        # Its share of the operand, column by column, and of the values.
        row = n.size * block
        share = ceil_div(plan.params.k * n.size, tiles)
        sends += ceil_div(share, row) + 2 * (plan.n_split > 1)
        long += ceil_div(share, row) * (row * size > 4 * facts.SHORT_WORDS)
    away = ~sums.at_home
    sends += np.bincount(sums.tile[away], minlength=tiles)
    receives += _moved(plan)
    pointers = receives if which == "high" else 3.0
    code = getattr(facts.RECEIVE, which) * receives + getattr(facts.SEND, which) * sends
    code = code + getattr(facts.LONG_SEND, which) * long
    code = code + getattr(facts.RECEIVE_POINTER, which) * pointers
    return np.asarray(code + 3 * getattr(facts.EXCHANGE_ENTRY, which))


def _moved(plan: StaticPlan) -> np.ndarray:
    """Fragments in which sums made elsewhere come to the tiles of the result: [tiles]."""
    outputs, sums = plan.outputs, plan.sums
    begins = np.concatenate([sums.begin[~sums.at_home], outputs.begin[sums.spread]])
    tile = np.searchsorted(outputs.begin, np.unique(begins), "right") - 1
    return np.bincount(outputs.tile[tile], minlength=plan.target.tiles)
