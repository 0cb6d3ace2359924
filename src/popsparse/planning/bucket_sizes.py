"""The fixed sizes of buckets, chosen by the plan before any pattern is known.

See sections 2.1 and 2.2 of docs/popsparse-formulas.md. Vectorised over partitions: `x` and `y`
are groups (elements or blocks) of a tile, integers or integer arrays.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from popsparse.planning.data_types import DataType
from popsparse.planning.words import GRAD_W_WORKER, ROW_ENTRY, header_words

Ints = Any
_SUB_GROUPS = 2  # What the original provides room for; a bucket may hold more, smaller ones.


def ceil_fraction(total: Ints, ratio: float) -> Ints:
    """ceil(total * ratio), safe against a product that rounding lifts above an integer."""
    return np.ceil(np.asarray(total) * ratio * (1 - 1e-12)).astype(np.int64)


def aligned(value: Ints, grain: int) -> Ints:
    return -(-np.asarray(value) // grain) * grain


def _round_half_up(value: Any) -> Ints:
    return np.floor(np.asarray(value) + 0.5).astype(np.int64)


def groups_per_bucket(
    groups: int, tiles: Ints, oversize: float, area: int, dtype: DataType, exchange_bytes: float
) -> Ints:
    """Elements or blocks a bucket has room for, when `groups` of them are spread over `tiles`."""
    perfect = -(-groups // np.asarray(tiles))
    size = area * dtype.size
    grain = math.lcm(size, max(1, int(exchange_bytes))) // size
    return aligned(_round_half_up(perfect * (1 + oversize)), grain)


def value_elements(groups: Ints, area: int, partials: DataType, *, grad_weight: bool) -> Ints:
    """Values of a bucket; whole 64-bit words of partials where grad_weight uses them as such."""
    return aligned(groups * area, 8 // partials.size if grad_weight else 1)


def expected_groups(x: Ints, y: Ints, ratio: float) -> tuple[Ints, Ints]:
    """Non-empty rows of a tile of x by y groups, and groups in each, for a uniform pattern."""
    x, y = np.asarray(x), np.asarray(y)
    rows = np.ceil(x * (1.0 - np.power(1.0 - ratio, y))).astype(np.int64)
    rows = np.maximum(rows, 1)
    return rows, -(-ceil_fraction(x * y, ratio) // rows)


def _words(fixed: int, entries: Ints, oversize: float, exchange_bytes: float) -> Ints:
    content = np.ceil(entries * (1 + oversize)).astype(np.int64)
    return aligned(_SUB_GROUPS * fixed + content, math.lcm(2, max(1, int(exchange_bytes))))


def meta_info_words(
    x: Ints,
    y: Ints,
    ratio: float,
    oversize: float,
    workers: int,
    exchange_bytes: float,
    *,
    block: bool,
    grad_weight: bool,
) -> Ints:
    """Words of the meta-info of a bucket that forward (and grad_weight) read."""
    rows, columns = expected_groups(x, y, ratio)
    fixed = header_words(workers, element=not block)
    if grad_weight:
        # The original counts the element format's word for the number of workers once a worker.
        fixed += workers * (GRAD_W_WORKER + (0 if block else 1))
    return _words(fixed, rows * (ROW_ENTRY + columns), oversize, exchange_bytes)


def own_grad_input_words(
    x: Ints, y: Ints, ratio: float, oversize: float, workers: int, exchange_bytes: float
) -> Ints:
    """Words of the buckets of grad_input's own; x, y are the groups of the forward pass."""
    rows, columns = expected_groups(y, x, ratio)
    fixed = header_words(workers, element=True)
    return _words(fixed, rows * (ROW_ENTRY + 2 * columns), oversize, exchange_bytes)
