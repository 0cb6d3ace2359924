"""What computes a layer of which this rank holds a rectangle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.distributed.moves import gathered, same, slab, summed
from dynsparse.distributed.placement import Placement, slice_pattern
from dynsparse.nn import SparseLinear
from dynsparse.nn.active_set import ActiveSet
from dynsparse.nn.sharded import gathered as gathered_shards
from dynsparse.ops.linear import linear
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import DimShard, RankGrid


@dataclass(frozen=True, eq=False)
class Rectangle:
    """An executor (`nn.backends`): the layer holds one slab of rows and one of columns, with a
    pattern and values of its own, and the ranks of a grid add up what they compute.

    Rank (i, j, z) computes Y_i = sum over j of X_j W_ij^T for its samples: forward is a sum over
    the line of the columns' axis, the gradient of the input one over the rows' axis, as the passes
    of PopSparse are over tiles. The gradient of the weights is a sum over z, which is left to what
    makes a model data parallel.

    Attributes:
        grid: the lines of ranks.
        placement: which axes rows and columns are spread over, and what comes in and goes out.
        shape: [out, in] of the whole layer.
        row_borders, col_borders: of the slabs, in features.
        given_borders: of the features that come in.
        blocks: present blocks of the whole layer when it was cut.
        active: the slots that the forward pass uses, where it does not use all: Top-KAST's.
    """

    grid: RankGrid
    placement: Placement
    shape: tuple[int, int]
    row_borders: tuple[int, ...]
    col_borders: tuple[int, ...]
    given_borders: tuple[int, ...]
    blocks: int
    active: ActiveSet | None = None

    target = None

    @property
    def rows(self) -> tuple[int, int]:
        """The first feature of this rank's slab of rows, and the one behind its last."""
        return self.dim_shards[0].ends

    @property
    def cols(self) -> tuple[int, int]:
        """The same of its slab of columns."""
        return self.dim_shards[1].ends

    @property
    def dim_shards(self) -> tuple[DimShard, DimShard]:
        """Of its rows and columns."""
        line = self.grid.line
        return (
            DimShard(line(self.placement.rows), self.row_borders),
            DimShard(line(self.placement.cols), self.col_borders),
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layer is spread over; along others all ranks hold the same."""
        return tuple(axis for axis in self.placement[:2] if axis is not None)

    def __call__(self, layer: SparseLinear, x: Tensor) -> Tensor:
        """x [..., in], or the slab that comes in, -> [..., out], or this rank's slab of it."""
        placement, line = self.placement, self.grid.line
        given = line(placement.input)
        width = self.given_borders[given.rank + 1] - self.given_borders[given.rank]
        if x.shape[-1] != width:
            raise ValueError(
                f"expected {width} features on rank {given.rank} of the axis {placement.input!r} "
                f"(None: all features), got x {list(x.shape)}"
            )
        if placement.input != placement.cols:
            x = gathered(x, given, self.given_borders)
            x = slab(x, line(placement.cols), self.col_borders)
        x = same(x, line(placement.rows))
        bias = layer.bias
        if placement.cols is None:
            y = self._product(layer, x, bias)
        else:
            y = summed(self._product(layer, x, None), line(placement.cols))
            y = y if bias is None else y + bias.to(y.dtype)
        return gathered(y, line(placement.rows), self.row_borders) if placement.gather_output else y

    def _product(self, layer: SparseLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.active is not None:
            return self.active.product(layer, x, bias)
        values, index = layer.snapshot()
        return linear(x, values, index, bias)

    def kernel(self, batch: int, backward: bool) -> str:
        return "rectangle"

    def after(self, pattern: SparsePattern) -> Rectangle:
        """Patterns change inside the rectangle, which stays; the choice of slots goes."""
        return self.with_active(None)

    def with_active(self, active: ActiveSet | None) -> Rectangle:
        """The same rectangle, whose forward pass uses these slots."""
        return self if active is self.active else replace(self, active=active)

    def slots(self, pattern: SparsePattern) -> tuple[Tensor, int]:
        """See `ranks.ShardSpec`: by how many non-zeros each row has in each rectangle."""
        rows, cols = self.dim_shards
        counts = pattern.row_ptr.long().diff()
        beside = torch.stack(cols.ranks.all_gather(counts, [len(counts)] * cols.ranks.size))
        in_row = beside.sum(0)
        slab = in_row.sum().view(1)
        above = torch.cat(rows.ranks.all_gather(slab, [1] * rows.ranks.size))
        first = above[: rows.ranks.rank].sum() + in_row.cumsum(0) - in_row
        first += beside[: cols.ranks.rank].sum(0)
        at = pattern.rows.long()
        own = torch.arange(pattern.nnz) - pattern.row_ptr.long()[at]
        return first[at] + own, int(above.sum())

    def to_full(self, flat: Tensor, block_size: int) -> Tensor:
        """Flat block positions in the rectangle as positions in the whole; the order stays."""
        (top, _), (left, right) = self.rows, self.cols
        width = (right - left) // block_size
        rows = flat // width + top // block_size
        return rows * (self.shape[1] // block_size) + flat % width + left // block_size

    def to_local(self, flat: Tensor, block_size: int) -> Tensor:
        """Those of flat positions in the whole layer that are inside, as positions in it."""
        top, (left, right) = self.rows[0], self.cols
        flat = flat[self.inside(flat, block_size)]
        whole, width = self.shape[1] // block_size, (right - left) // block_size
        return (flat // whole - top // block_size) * width + flat % whole - left // block_size

    def inside(self, flat: Tensor, block_size: int) -> Tensor:
        """Which flat positions in the whole layer are in the rectangle."""
        width = self.shape[1] // block_size
        row, col = flat // width * block_size, flat % width * block_size
        (top, bottom), (left, right) = self.rows, self.cols
        return (row >= top) & (row < bottom) & (col >= left) & (col < right)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rectangle:
        return self  # it does not change


def spec_of(layer: SparseLinear) -> Rectangle | None:
    """What a layer's rectangle is; None for a layer that is whole."""
    return layer.executor if isinstance(layer.executor, Rectangle) else None


@torch.no_grad()
def take_part(layer: SparseLinear, spec: Rectangle) -> None:
    """Keep only this rank's rectangle of a layer that is whole; its Parameters become new ones."""
    pattern, slots = slice_pattern(layer.pattern, spec.rows, spec.cols)
    values = layer.values.detach()[slots.to(layer.values.device)].clone()
    bias = layer.bias
    layer.values = nn.Parameter(values, layer.values.requires_grad)
    layer.out_features, layer.in_features = pattern.shape
    if bias is not None and spec.placement.rows is not None:
        own = spec.dim_shards[0].narrow(bias.detach(), 0).clone()
        layer.bias = nn.Parameter(own, bias.requires_grad)
        layer.dim_shards = {"bias": (spec.dim_shards[0], 0)}
    layer.executor = spec
    layer._install(pattern)


@torch.no_grad()
def whole_layer(layer: SparseLinear) -> dict[str, Tensor]:
    """Pattern and values of the whole layer, on every rank, as its `state_dict` has them.

    All ranks of the grid call it at the same time.
    """
    spec = spec_of(layer)
    if spec is None:
        return layer.state_dict()
    b = layer.block_size
    values = gathered_shards(layer.values.detach())
    flat = spec.to_full(layer.pattern.flat, b).to(values.device)
    for axis in (spec.placement.cols, spec.placement.rows):
        line = spec.grid.line(axis)
        flat, values = torch.cat(line.all_gather(flat)), torch.cat(line.all_gather(values))
    order = flat.argsort()
    flat = flat[order]
    width = spec.shape[1] // b
    return {
        "values": values[order],
        "rows": (flat // width).int(),
        "cols": (flat % width).int(),
    }
