"""The sparse operand on the machine: meta-info and values of all buckets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynsparse.machine import UNSIGNED_SHORT, Graph, Tensor, concat
from dynsparse.popsparse.dense import planner as dense
from dynsparse.popsparse.dense.planner import DensePlan
from dynsparse.popsparse.device.layout import machine_type, reorder, tile_grid
from dynsparse.popsparse.product.options import Options
from dynsparse.popsparse.product.plan import Plan, Sizes

__all__ = ["SparseTensor", "checked_weights", "control_tile", "dense_cut", "dense_layout"]

_HOST_ORDER = "gxyz"


def control_tile(plan: Plan) -> int:
    """The tile of all loop counters: the first without a bucket, if there is one."""
    return min(plan.target.tiles - 1, plan.tiles_used)


def dense_cut(plan: Plan) -> DensePlan:
    """How the dense product of one group is cut over its share of the tiles."""
    sizes = plan.sizes
    target = plan.target.with_(tiles=max(1, plan.target.tiles // sizes.groups))
    return dense.plan(
        sizes.x, sizes.y, sizes.z, plan.dtype, target, partials=plan.options.partials_type
    )


def dense_layout(plan: Plan, cut: DensePlan) -> Plan:
    """The plan with the partition of a dense product in place of its own, in single elements."""
    x, z = (cut.out, cut.field) if cut.swapped else (cut.field, cut.out)
    groups = plan.partition.groups
    return replace(plan, partition=Sizes(groups, x, cut.in_, z), grouping=Sizes(1, 1, 1, 1))


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
        dense: the cut of the dense product that takes the place of the sparse one, for plans with
            `use_dense`. Then there are no words, and `values` is [groups, y, x, in, out].
    """

    plan: Plan
    meta_info: Tensor
    nz_values: Tensor
    overflow: Tensor
    words: Tensor
    values: Tensor
    dense: DensePlan | None = None

    @classmethod
    def create(cls, graph: Graph, plan: Plan, name: str = "weights") -> SparseTensor:
        """Variables for one matrix (a group of them) of a plan."""
        if plan.use_dense:
            return cls._create_dense(graph, plan, name)
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
    def _create_dense(cls, graph: Graph, plan: Plan, name: str) -> SparseTensor:
        cut = dense_cut(plan)
        spread = dense_layout(plan, cut)
        tiles = tile_grid(spread, "gyzx")[:, :, 0]
        part = spread.elements_per_tile
        values = graph.add_variable(
            machine_type(plan), [*tiles.shape, part.y, part.x], f"{name} values", tiles=tiles
        )
        graph.set_initial_value(values, 0)
        at = values.addresses().transpose(0, 1, 3, 2, 4)
        at = at.reshape(at.shape[0], at.shape[1] * part.y, -1)
        at = at[:, : plan.sizes.y, : plan.sizes.x].reshape(-1)
        natural = Tensor(graph, values.dtype, at.shape, addresses=at)
        none = graph.add_variable(UNSIGNED_SHORT, [0], f"{name} meta-info", tiles=0)
        return cls(plan, none, natural, none, none, values, cut)

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
