"""All partitions of a sparse product over the tiles, as arrays, and which of them are allowed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from popsparse.planning.data_types import DataType
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams, planned_block
from popsparse.planning.parts import all_partitions, ceil_div, even_parts
from popsparse.planning.plan import Method, Sizes
from popsparse.planning.words import WORD_LIMIT


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
        return planned_block(self.params.sparsity_params.block_dimensions, self.dtype)

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
