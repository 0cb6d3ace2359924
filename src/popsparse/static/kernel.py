"""What the static vertices compute: each tile's blocks times the dense columns it gathered."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from popsparse.machine.intervals import Runs
from popsparse.static.layout import Pieces, StaticPlan


def multiply_pieces(pieces: Pieces, values: np.ndarray, operand: np.ndarray) -> np.ndarray:
    """All pieces of one part of n as one block-diagonal product.

    Args:
        values: [blocks, b, b] in device order.
        operand: [columns of all pieces, n, b], the gathered dense columns.

    Returns:
        [rows of all pieces, n, b] of the operand's type. Elements add up in float32 and round
        once a row; float16 blocks round to float16 after each block, as the matrix units do.
    """
    columns, n, block = operand.shape
    rows = len(pieces.row)
    dense = operand.astype(np.float32).transpose(0, 2, 1)
    if block > 1 and operand.dtype == np.float16:
        found = np.zeros((rows, block, n), np.float16)
        first = np.searchsorted(pieces.block_row, pieces.block_row)
        turn = np.arange(len(values)) - first
        for number in range(int(turn.max(initial=-1)) + 1):
            now = turn == number
            product = values[now].astype(np.float32) @ dense[pieces.block_column[now]]
            at = pieces.block_row[now]
            found[at] = found[at].astype(np.float32) + product
        return found.transpose(0, 2, 1)
    offsets = np.append(0, np.cumsum(np.bincount(pieces.block_row, minlength=rows)))
    shape = (rows * block, columns * block)
    blocks = values.astype(np.float32)
    if block == 1:
        matrix = scipy.sparse.csr_array((blocks.ravel(), pieces.block_column, offsets), shape=shape)
    else:
        matrix = scipy.sparse.bsr_array((blocks, pieces.block_column, offsets), shape=shape)
    result = np.asarray(matrix @ dense.reshape(columns * block, n)).reshape(rows, block, n)
    return result.transpose(0, 2, 1).astype(operand.dtype)


def reduction_sources(plan: StaticPlan, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rows of `multiply_pieces` belong to each row place of the result: their indices, by
    row place and then by piece, and where each row place begins, [m / b + 1]."""
    row = plan.pieces(part).row
    begins = np.append(0, np.cumsum(np.bincount(row, minlength=plan.pattern.grid[0])))
    return np.argsort(row, kind="stable"), begins


def add_partials(
    values: np.ndarray, begin: np.ndarray, length: np.ndarray, turn: np.ndarray, outputs: int
) -> np.ndarray:
    """Partial sums added in float32 into the outputs they belong to.

    Args:
        values: [p], stretch after stretch.
        begin, length: of each stretch in the outputs, int64 [stretches].
        turn: how many stretches of the same outputs come before it: they are added in this order.
        outputs: how many there are.
    """
    total = np.zeros(outputs, np.float32)
    first = np.cumsum(length) - length
    for number in range(int(turn.max(initial=-1)) + 1):
        now = turn == number
        to = Runs(begin[now], length[now]).addresses()
        total[to] += values[Runs(first[now], length[now]).addresses()]
    return total


def multiply(plan: StaticPlan, values: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """The product with the machine's arithmetic, without the machine.

    Args:
        values: [nnz, b, b] (or [nnz]) of `plan.pattern`, in its order.
        dense: [k, n].

    Returns:
        [m, n] of the plan's type, to the last bit what the device program gives.
    """
    kind = np.dtype(plan.dtype.name)
    (height, width), block = plan.pattern.grid, plan.pattern.block_size
    n = plan.params.n
    operand = np.zeros((width, plan.n_padded, block), kind)
    operand[:, :n] = np.asarray(dense).reshape(width, block, n).transpose(0, 2, 1)
    ordered = np.asarray(values).reshape(-1, block, block)[plan.order].astype(kind)
    out = np.zeros((height, plan.n_padded, block), kind)
    for part, columns in enumerate(plan.n_parts):
        pieces = plan.pieces(part)
        gathered = operand[plan.column_order[pieces.column], columns.begin : columns.end]
        partials = multiply_pieces(pieces, ordered, gathered)
        if not len(partials):
            continue
        order, begins = reduction_sources(plan, part)
        depth = np.diff(begins)
        total = np.zeros((height, *partials.shape[1:]), np.float32)
        for number in range(int(depth.max())):
            there = np.flatnonzero(depth > number)
            total[there] += partials[order[begins[there] + number]]
        out[plan.row_order, columns.begin : columns.end] = total
    return out[:, :n].transpose(0, 2, 1).reshape(height * block, n)
