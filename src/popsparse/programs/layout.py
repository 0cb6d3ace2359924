"""The layout of operands and weights on the tiles.

The tiles of a plan are a grid: groups, x, y, z. A dense operand has two of the dimensions, its own
(y for the input, x for the gradient of the output) and z; the tiles along the third all need the
same part of it. At home that part is spread over those tiles, so each holds only its share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from popsparse.machine import (
    UNSIGNED_SHORT,
    Codelet,
    Copy,
    DType,
    Execute,
    Graph,
    Tensor,
    concat,
)
from popsparse.planning.options import Options
from popsparse.planning.params import ceil_div
from popsparse.planning.plan import Plan, PlanningCache, store_plan

# Exchanges of fewer bytes per tile are not worth spreading: section 5.1 of
# docs/popsparse-formulas.md.
_LEAST_BYTES = 128


def tile_grid(plan: Plan, order: str) -> np.ndarray:
    """The tile of every part, the dimensions in the order given, e.g. "gyzx".

    Neighbouring tiles share an exchange bus, so x is innermost: its parts receive the same data in
    forward and grad_input.
    """
    parts = plan.partition
    tiles = np.arange(plan.tiles_used).reshape(parts.groups, parts.y, parts.z, parts.x)
    return tiles.transpose(["gyzx".index(dim) for dim in order])


def rectangles(plan: Plan, order: str) -> np.ndarray:
    """x * Ny + y of every part, the dimensions in the order given."""
    groups, x, y, z = plan.partition
    grid = np.broadcast_to(np.arange(x * y).reshape(1, x, y, 1), (groups, x, y, z))
    return grid.transpose(["gxyz".index(dim) for dim in order])


def execute(
    graph: Graph, name: str, codelet: Codelet, tiles: Any, edges: dict[str, Any], step: str = ""
) -> Execute:
    """A step of one new compute set: a vertex on each of the tiles. `step` is the step's name if it
    differs from the compute set's."""
    compute = graph.add_compute_set(name)
    graph.add_vertices(compute, codelet, tiles, edges)
    return Execute(compute, name=step or name)


def reorder(tensor: Tensor, source: str, order: str) -> Tensor:
    """A view whose leading dimensions, named by `source`, are in another order."""
    rest = range(len(source), tensor.ndim)
    return tensor.transpose(*(source.index(dim) for dim in order), *rest)


@dataclass(frozen=True)
class OperandLayout:
    """The cut of a dense operand or result [batch, groups * channels].

    `dim` is its channel dimension, "x" (output channels) or "y" (input channels); `other` is the
    one along which tiles share it.
    """

    plan: Plan
    dim: str

    @property
    def other(self) -> str:
        return "y" if self.dim == "x" else "x"

    @property
    def order(self) -> str:
        """Order of the grid's dimensions in all variables of this operand."""
        return f"g{self.dim}z{self.other}"

    @property
    def channels(self) -> int:
        """Number of channels of one group."""
        return int(getattr(self.plan.sizes, self.dim))

    @property
    def part(self) -> tuple[int, int]:
        """Channels and batch elements of the fullest tile."""
        sizes = self.plan.elements_per_tile
        return getattr(sizes, self.dim), sizes.z

    @property
    def numel(self) -> int:
        """Number of elements of a part."""
        channels, batch = self.part
        return channels * batch

    @cached_property
    def tiles(self) -> np.ndarray:
        return tile_grid(self.plan, self.order)

    @property
    def shape(self) -> tuple[int, int]:
        """[batch, groups * channels]."""
        return self.plan.sizes.z, self.plan.sizes.groups * self.channels

    @property
    def is_padded(self) -> bool:
        """Whether the parts hold more than the operand does."""
        parts = self.plan.partition
        channels, batch = self.part
        padded = (getattr(parts, self.dim) * channels, parts.z * batch)
        return padded != (self.channels, self.plan.sizes.z)

    def matches(self, other: Any) -> bool:
        """Whether tensors of the other layout lie the same way as those of this one."""
        return (
            isinstance(other, OperandLayout)
            and self.dim == other.dim
            and self.plan.partition == other.plan.partition
            and self.plan.grouping == other.plan.grouping
            and self.plan.sizes == other.plan.sizes
        )

    def add_home(self, graph: Graph, name: str, dtype: DType) -> Tensor:
        """Add a variable [*grid without the last dimension, sharing tiles, share] for the operand.

        Its padding, if it has any, is 0: grad_weight sums over it.
        """
        grid = self.tiles
        share = max(ceil_div(self.numel, grid.shape[-1]), _LEAST_BYTES // dtype.size)
        used = ceil_div(self.numel, share)
        tiles = grid[..., :used]
        home = graph.add_variable(dtype, [*tiles.shape, share], name, tiles=tiles)
        if self.is_padded:
            graph.set_initial_value(home, 0)
        return home

    def natural(self, home: Tensor) -> PlannedTensor:
        """View a home as the operand, [batch, groups * channels]."""
        channels, batch = self.part
        at = home.addresses().reshape(*home.shape[:-2], -1)[..., : self.numel]
        groups, parts, parts_z = at.shape[:3]
        at = at.reshape(groups, parts, parts_z, channels, batch).transpose(2, 4, 0, 1, 3)
        at = at.reshape(parts_z * batch, groups, parts * channels)
        at = at[: self.shape[0], :, : self.channels].reshape(self.shape)
        return PlannedTensor(home, at, self)

    def check(self, tensor: Tensor) -> None:
        """Check that a tensor is such an operand.

        Raises:
            ValueError: a shape other than [batch, groups * channels]. TypeError: another type.
        """
        if tensor.shape != self.shape:
            what = "output" if self.dim == "x" else "input"
            raise ValueError(
                f"expected a tensor [batch, {what} channels] of the shape {list(self.shape)}, "
                f"got {list(tensor.shape)}"
            )
        expected = self.plan.dtype
        if tensor.dtype != expected:
            raise TypeError(f"expected a tensor of {expected.name}, got {tensor.dtype.name}")

    def bring_home(self, graph: Graph, tensor: Tensor, name: str) -> tuple[Tensor, list[Copy]]:
        """The operand in this layout, copied into it if necessary. Raises what `check` raises."""
        self.check(tensor)
        if isinstance(tensor, PlannedTensor) and self.matches(tensor.layout):
            return tensor.home, []
        home = self.add_home(graph, name, tensor.dtype)
        return home, [Copy(tensor, self.natural(home), name="regroup")]

    def add_local(
        self, graph: Graph, home: Tensor, name: str, order: str | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The part that each tile works on, [*grid, numel], and the pair of the `Copy` that fills
        it. `order` is that of the grid; defaults to the layout's."""
        order = order or self.order
        shared, share = home.shape[-2:]
        tiles = tile_grid(self.plan, order)
        local = graph.add_variable(home.dtype, [*tiles.shape, shared, share], name, tiles=tiles)
        source = home.expand_dims(3).broadcast_to(*self.tiles.shape, shared, share)
        used = local.reshape(*tiles.shape, shared * share)[..., : self.numel]
        return used, (reorder(source, self.order, order), local)


class PlannedTensor(Tensor):
    """A dense operand or result on the tiles in the layout of a plan.

    Use it like any tensor of its shape; products with this layout copy nothing.

    Attributes:
        home: the variable that holds its elements.
        layout: their layout in it, as described by the product.
    """

    __slots__ = ("home", "layout")

    def __init__(self, home: Tensor, addresses: np.ndarray, layout: Any) -> None:
        super().__init__(home.graph, home.dtype, addresses.shape, addresses=addresses)
        self.home = home
        self.layout = layout

    def create_like(self, graph: Graph, dtype: DType, name: str) -> PlannedTensor:
        """A new tensor of this type, with the shape and layout of this one."""
        tiles = graph.tiles_of(self.home)
        home = graph.add_variable(dtype, list(self.home.shape), name, tiles=tiles)
        addresses = self.home.addresses().reshape(-1)
        if len(addresses) > self.numel:
            graph.set_initial_value(home, 0)  # the padding
        order = np.argsort(addresses)
        place = order[np.searchsorted(addresses, self.addresses(), sorter=order)]
        return PlannedTensor(home, home.addresses().reshape(-1)[place], self.layout)


def keep_layout(tensor: Tensor, view: Tensor) -> Tensor:
    """Give `view`, which has all elements of `tensor`, the layout of `tensor`, if it has one."""
    if not isinstance(tensor, PlannedTensor):
        return view
    return PlannedTensor(tensor.home, view.addresses(), tensor.layout)


def create_operand(graph: Graph, plan: Plan, dim: str, name: str) -> PlannedTensor:
    """Create an operand, at home: the input (`dim` "y") or the gradient of the output ("x")."""
    layout = OperandLayout(plan, dim)
    return layout.natural(layout.add_home(graph, name, plan.dtype))


HOST_ORDER = "gxyz"
"""The order in which the host sees buckets."""


def control_tile(plan: Plan) -> int:
    """The tile of all loop counters: the first without a bucket, if there is one."""
    return min(plan.target.tiles - 1, plan.tiles_used)


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """A sparse matrix on the machine.

    Attributes:
        plan: its plan.
        meta_info: [words], uint16; write `Encoded.meta_info` to it.
        nz_values: [values]; write `Encoded.nz_values` to it.
        overflow: [words] of the overflow record, on the control tile.
        words: [groups, x, y, z, words of a bucket].
        values: [groups, x, y, z, values of a bucket]; for plans with `use_dense` the weights
            [groups, in, out], without words.
    """

    plan: Plan
    meta_info: Tensor
    nz_values: Tensor
    overflow: Tensor
    words: Tensor
    values: Tensor

    @classmethod
    def create(cls, graph: Graph, plan: Plan, name: str = "weights") -> SparseTensor:
        """Create the variables of one matrix of a plan, or of a group of matrices."""
        sizes = plan.buckets
        tiles = tile_grid(plan, HOST_ORDER)
        overflow = graph.add_variable(
            UNSIGNED_SHORT, [sizes.overflow_words], f"{name} overflow", tiles=control_tile(plan)
        )
        words = graph.add_variable(
            UNSIGNED_SHORT, [*tiles.shape, sizes.words], f"{name} meta-info", tiles=tiles
        )
        values = graph.add_variable(
            plan.dtype, [*tiles.shape, sizes.nz_elements], f"{name} values", tiles=tiles
        )
        # Until the host writes a pattern, it is empty.
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

    @classmethod
    def of_meta_info(cls, plan: Plan, meta_info: Tensor) -> SparseTensor:
        """Create a pattern without values from the `meta_info` of weights of this plan.

        Raises:
            ValueError: a tensor of a wrong size or type.
        """
        sizes = plan.buckets
        grid = tile_grid(plan, HOST_ORDER).shape
        words = 0 if plan.use_dense else sizes.overflow_words + math.prod(grid) * sizes.words
        if meta_info.dtype != UNSIGNED_SHORT or meta_info.shape != (words,):
            raise ValueError(
                f"expected meta-info of uint16 [{words}] for these parameters and options, "
                f"got {meta_info.dtype.name} {list(meta_info.shape)}"
            )
        none = meta_info[:0]
        if plan.use_dense:
            return cls(plan, meta_info, none, none, none, none)
        overflow = meta_info[: sizes.overflow_words]
        buckets = meta_info[sizes.overflow_words :].reshape(*grid, sizes.words)
        return cls(plan, meta_info, none, overflow, buckets, none)

    def pass_words(self, name: str, order: str) -> Tensor:
        """The words that a pass reads, [*grid in this order, words]."""
        sizes = self.plan.buckets
        is_grad_input = name == "grad_input" and sizes.grad_input_words > 0
        part = slice(sizes.forward_words, None) if is_grad_input else slice(0, sizes.forward_words)
        return reorder(self.words[..., part], HOST_ORDER, order)


def check_weights(
    weights: SparseTensor, params: Any, options: Any, cache: PlanningCache | None = None
) -> SparseTensor:
    """Check that the weights were made for these parameters and options, and return them; `cache`
    keeps their plan."""
    plan = weights.plan
    if params != plan.params:
        raise ValueError(f"the weights were made for {plan.params}, not for {params}")
    requested = Options.parse(options).repaired(plan.dtype, params.sparsity_params.is_element)
    plan.options.check_equal(requested, "the weights were")
    store_plan(cache, plan)
    return weights
