"""Cycles of the vertices around the sparse ones: cast, reduce, transpose, gather, rearrange.

Vectorised like `planning.vertex_cycles`: section 3.4 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.planning.data_types import DataType
from popsparse.planning.parts import ceil_div

Ints = Any


def cast(elements: Ints, source: DataType, result: DataType, workers: int) -> Ints:
    """Converting `elements` numbers."""
    share = ceil_div(elements, workers)
    slowest = min(source.vector_width, result.vector_width)
    return workers * (26 + ceil_div(share, slowest))


def reduce(outputs: Ints, depth: Ints, partials: DataType, result: DataType, workers: int) -> Ints:
    """Adding `depth` partials into each of `outputs` results."""
    width = 2 * partials.vector_width
    outputs, depth = np.asarray(outputs), np.asarray(depth)
    rest = outputs % width
    # What is left after the whole vectors is done in powers of two.
    odd_loops = sum((rest >> bit) & 1 for bit in range(3))
    loops = outputs // width + odd_loops
    share, more = loops // workers, loops % workers > 0
    remainder = np.where(more & (rest != 0), 2 * depth + (13 if partials.size == 4 else 11), 0)
    share = share + (more & (rest == 0))
    store = {(4, 4): 7, (4, 2): 6, (2, 4): 9, (2, 2): 8}[partials.size, result.size]
    return workers * (32 + remainder + share * (3 * depth + store))


def transpose_blocks(count: Ints, rows: int, columns: int, dtype: DataType, workers: int) -> Ints:
    """Transposing `count` blocks of rows x columns."""
    grain = dtype.vector_width
    per_grain = 3 if dtype.size == 4 else 4
    row_grains, column_grains = -(-rows // grain), -(-columns // grain)
    share = ceil_div(count, workers)
    if row_grains == column_grains == 1:
        work = np.where(share == 1, 29, 37 + (share - 2) * per_grain)
    elif column_grains == 1:
        work = 27 + share * (35 + per_grain * (row_grains - 2))
    else:
        work = 29 + share * (18 + row_grains * (12 + per_grain * (column_grains - 2)))
    return 7 + workers * work


def gather(elements: Ints, dtype: DataType, workers: int) -> Ints:
    """Permuting the non-zeros of a bucket for grad_input's own buckets."""
    elements = np.asarray(elements)
    width = dtype.vector_width
    rest = elements % width
    vectors = ceil_div(elements // width, workers)
    # The last, partial vector replaces one turn of the loop where there is a loop.
    if dtype.size == 4:
        first, step, partial = 5, 3, np.where(rest > 0, 5, 0)
    else:
        first, step, partial = 8, 5, np.select([rest == 0, rest == 3], [0, 14], 10)
    loop = np.where(vectors > 0, first + step * (vectors - 1), 0)
    extra = np.maximum(0, partial - np.where(vectors > 0, step, 0))
    return 18 + workers * (23 + loop + extra)


def rearrange_batch(blocks: Ints, edge: int, z: Ints, dtype: DataType, workers: int) -> Ints:
    """Bringing a dense operand into the order in which grad_weight's matrix units read it."""
    steps = np.asarray(z) // (32 // dtype.size)
    inner = 12 * edge // 2 if dtype.size == 4 else 23 * edge // 4
    return 18 + workers * (34 + ceil_div(blocks, workers) * (3 + steps * (3 + inner)))
