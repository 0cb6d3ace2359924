"""The sparse operand on the machine: meta-info and values of all buckets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynsparse.machine.dtypes import UNSIGNED_SHORT
from dynsparse.machine.graph import Graph
from dynsparse.machine.tensor import Tensor, concat
from dynsparse.popsparse.device_layout import machine_type, reorder, tile_grid
from dynsparse.popsparse.plan import Plan

__all__ = ["SparseTensor", "control_tile"]

_HOST_ORDER = "gxyz"


def control_tile(plan: Plan) -> int:
    """The tile of all loop counters: the first without a bucket, if there is one."""
    return min(plan.target.tiles - 1, plan.tiles_used)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """A sparse matrix on the machine.

    Attributes:
        plan: what it was made for.
        meta_info: [words], unsigned short, what `Encoded.meta_info` is written to.
        nz_values: [values], what `Encoded.nz_values` is written to.
        overflow: [words] of the overflow record, on the control tile.
        words: [groups, x, y, z, words of a bucket].
        values: [groups, x, y, z, values of a bucket].
    """

    plan: Plan
    meta_info: Tensor
    nz_values: Tensor
    overflow: Tensor
    words: Tensor
    values: Tensor

    @classmethod
    def create(cls, graph: Graph, plan: Plan, name: str = "weights") -> SparseTensor:
        """Variables for one matrix (a group of them) of a plan."""
        sizes = plan.buckets
        tiles = tile_grid(plan, _HOST_ORDER)
        overflow = graph.add_variable(
            UNSIGNED_SHORT, [sizes.overflow_words], f"{name} overflow", tiles=control_tile(plan)
        )
        words = graph.add_variable(
            UNSIGNED_SHORT, [*tiles.shape, sizes.words], f"{name} meta-info", tiles=tiles
        )
        values = graph.add_variable(
            machine_type(plan), [*tiles.shape, sizes.nz_elements], f"{name} values", tiles=tiles
        )
        # Until the host writes a pattern there is none.
        counts = np.zeros(sizes.overflow_words, np.uint16)
        counts[:3] = 1, 1, plan.partition.z
        graph.set_initial_value(overflow, counts)
        graph.set_initial_value(words, 0)
        graph.set_initial_value(values, 0)
        meta_info = concat([overflow, words.flatten()])
        return cls(plan, meta_info, values.flatten(), overflow, words, values)

    def pass_words(self, name: str, order: str) -> Tensor:
        """The words that a pass reads, [*grid in this order, words]."""
        sizes = self.plan.buckets
        own = name == "grad_input" and sizes.grad_input_words > 0
        part = slice(sizes.forward_words, None) if own else slice(0, sizes.forward_words)
        return reorder(self.words[..., part], _HOST_ORDER, order)

    def pass_values(self, order: str) -> Tensor:
        """The values, [*grid in this order, values]."""
        return reorder(self.values, _HOST_ORDER, order)
