"""The sparse operand on the machine: meta-info and values of all buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from popsparse.machine import UNSIGNED_SHORT, Graph, Tensor, concat
from popsparse.planning.options import Options
from popsparse.planning.plan import Plan
from popsparse.programs.layout import machine_type, reorder, tile_grid

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
        values: [groups, x, y, z, values of a bucket]; the weights [groups, in, out] of plans with
            `use_dense`, which have no words.
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

    @classmethod
    def of_dense(cls, graph: Graph, plan: Plan, values: Tensor, name: str) -> SparseTensor:
        """Dense weights [groups, in, out] of a plan with `use_dense`: no words."""
        none = graph.add_variable(UNSIGNED_SHORT, [0], f"{name} meta-info", tiles=0)
        return cls(plan, none, values.flatten(), none, none, values)

    def pass_words(self, name: str, order: str) -> Tensor:
        """The words that a pass reads, [*grid in this order, words]."""
        sizes = self.plan.buckets
        own = name == "grad_input" and sizes.grad_input_words > 0
        part = slice(sizes.forward_words, None) if own else slice(0, sizes.forward_words)
        return reorder(self.words[..., part], _HOST_ORDER, order)

    def pass_values(self, order: str) -> Tensor:
        """The values, [*grid in this order, values]."""
        return reorder(self.values, _HOST_ORDER, order)


def checked_weights(weights: Any, params: Any, options: Any) -> SparseTensor:
    """The weights, if they were made for these parameters and options."""
    if not isinstance(weights, SparseTensor):
        raise TypeError(
            f"weights must be a SparseTensor as create_fully_connected_weights makes it, got "
            f"{type(weights).__name__}"
        )
    plan = weights.plan
    if params != plan.params:
        raise ValueError(f"the weights were made for {plan.params}, not for {params}")
    wanted = Options.parse(options).repaired(plan.dtype, params.sparsity_params.is_element)
    if wanted != plan.options:
        raise ValueError(f"the weights were made with {plan.options}, not with {wanted}")
    return weights
