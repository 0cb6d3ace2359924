"""All partitions of a product, and the bucket sizes they need.

See sections 2.1 and 2.2 of docs/popsparse-formulas.md. Vectorised over partitions: `x` and `y`
are groups (elements or blocks) of a tile, integers or integer arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from popsparse.planning.options import Options
from popsparse.planning.params import (
    GRAD_W_WORKER,
    ROW_ENTRY,
    WORD_LIMIT,
    DataType,
    FullyConnectedParams,
    all_partitions,
    block_for_plan,
    ceil_div,
    even_parts,
    header_words,
)
from popsparse.planning.plan import Method, Sizes


@dataclass(frozen=True)
class SearchSpace:
    """The partitions of one product under one method."""

    params: FullyConnectedParams
    options: Options
    dtype: DataType
    target: Any
    method: Method

    @cached_property
    def block(self) -> tuple[int, int]:
        return block_for_plan(self.params.sparsity_params.block_dimensions, self.dtype)

    @cached_property
    def grouping(self) -> Sizes:
        return self.method.grouping(self.block, self.dtype)

    @cached_property
    def groups(self) -> Sizes:
        """Groups of each dimension over the whole product."""
        p, g = self.params, self.grouping
        return Sizes(
            p.num_groups,
            ceil_div(p.output_channels_per_group, g.x),
            ceil_div(p.input_channels_per_group, g.y),
            ceil_div(p.batch_size, g.z),
        )

    @cached_property
    def partitions(self) -> np.ndarray:
        tiles = self.target.tiles // self.params.num_groups
        if tiles == 0:
            raise ValueError(
                f"each of the {self.params.num_groups} groups needs a tile of its own, "
                f"the target has {self.target.tiles}: use fewer groups or a larger target"
            )
        return all_partitions(tiles)

    @cached_property
    def tiles(self) -> np.ndarray:
        return self.params.num_groups * self.partitions.prod(axis=0)

    @cached_property
    def per_tile(self) -> np.ndarray:
        """Groups of x, y and z on the fullest tile, [3, count]."""
        groups = np.array(self.groups[1:])[:, None]
        return -(-groups // self.partitions)

    def broken_rules(self) -> dict[str, np.ndarray]:
        """By rule, which partitions break it."""
        px, py, pz = self.partitions
        _, nx, ny, nz = self.groups
        wanted = self.options.plan_constraints
        rules = {
            "x has parts that stay empty": px != even_parts(nx, px),
            "y has parts that stay empty": py != even_parts(ny, py),
            "z is not cut into equal parts": nz % pz != 0,
            "offsets exceed 16 bits": self._beyond_16_bits(),
        }
        for name, parts in zip("xyz", self.partitions, strict=True):
            value = getattr(wanted, name)
            if value is not None:
                rules[f"{name} is constrained to {value}"] = parts != value
        return rules

    def _beyond_16_bits(self) -> np.ndarray:
        tx, ty, tz = self.per_tile
        if self.method is not Method.ELEMENT:
            return np.zeros(tx.shape, bool)
        grain = self.grouping.z * self.dtype.size
        beyond = np.maximum((ty - 1) * tz * grain, tx - 1) > WORD_LIMIT
        if self.options.do_grad_a_pass and not self.options.shared_buckets:
            beyond |= np.maximum((tx - 1) * tz * grain, ty - 1) > WORD_LIMIT
        return beyond

    def allowed(self) -> np.ndarray:
        """Which partitions break no rule, bool [count]."""
        return ~np.logical_or.reduce(list(self.broken_rules().values()))


Ints = Any
_SUB_GROUPS = 2  # What the original provides room for; a bucket may hold more, smaller ones.


def ceil_fraction(total: Ints, ratio: float) -> Ints:
    """ceil(total * ratio), safe against a product that rounding lifts above an integer."""
    return np.ceil(np.asarray(total) * ratio * (1 - 1e-12)).astype(np.int64)


def align_up(value: Ints, grain: int) -> Ints:
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
    return align_up(_round_half_up(perfect * (1 + oversize)), grain)


def value_elements(groups: Ints, area: int, partials: DataType, *, grad_weight: bool) -> Ints:
    """Values of a bucket; whole 64-bit words of partials where grad_weight uses them as such."""
    return align_up(groups * area, 8 // partials.size if grad_weight else 1)


def expected_groups(x: Ints, y: Ints, ratio: float) -> tuple[Ints, Ints]:
    """Non-empty rows of a tile of x by y groups, and groups in each, for a uniform pattern."""
    x, y = np.asarray(x), np.asarray(y)
    rows = np.ceil(x * (1.0 - np.power(1.0 - ratio, y))).astype(np.int64)
    rows = np.maximum(rows, 1)
    return rows, -(-ceil_fraction(x * y, ratio) // rows)


def _words(fixed: int, entries: Ints, oversize: float, exchange_bytes: float) -> Ints:
    content = np.ceil(entries * (1 + oversize)).astype(np.int64)
    return align_up(_SUB_GROUPS * fixed + content, math.lcm(2, max(1, int(exchange_bytes))))


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
