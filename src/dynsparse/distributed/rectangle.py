"""What computes a layer of which this rank holds a rectangle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.distributed.cuts import rectangle
from dynsparse.distributed.moves import gathered, same, slab, summed
from dynsparse.distributed.placement import Placement
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import linear
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import RankGrid

__all__ = ["Rectangle", "part_of", "take_part", "whole_layer"]


@dataclass(frozen=True, eq=False)
class Rectangle:
    """An executor (`nn.targets`): the layer holds one slab of rows and one of columns, with a
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
    """

    grid: RankGrid
    placement: Placement
    shape: tuple[int, int]
    row_borders: tuple[int, ...]
    col_borders: tuple[int, ...]
    given_borders: tuple[int, ...]

    target = None

    @property
    def rows(self) -> tuple[int, int]:
        """The first feature of this rank's slab of rows, and the one behind its last."""
        i = self.grid.line(self.placement.rows).rank
        return self.row_borders[i], self.row_borders[i + 1]

    @property
    def cols(self) -> tuple[int, int]:
        """The same of its slab of columns."""
        j = self.grid.line(self.placement.cols).rank
        return self.col_borders[j], self.col_borders[j + 1]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layer is spread over; along others all ranks hold the same."""
        return tuple(axis for axis in self.placement[:2] if axis is not None)

    def __call__(self, layer: SparseLinear, x: Tensor) -> Tensor:
        """x [..., in], or the slab that comes in, -> [..., out], or this rank's slab of it."""
        placement, line = self.placement, self.grid.line
        given = line(placement.given)
        width = self.given_borders[given.rank + 1] - self.given_borders[given.rank]
        if x.shape[-1] != width:
            raise ValueError(
                f"expected {width} features on rank {given.rank} of the axis {placement.given!r} "
                f"(None: all features), got x {list(x.shape)}"
            )
        if placement.given != placement.cols:
            x = gathered(x, given, self.given_borders)
            x = slab(x, line(placement.cols), self.col_borders)
        x = same(x, line(placement.rows))
        values, index = layer.held()
        bias = layer.bias
        if placement.cols is None:
            y = linear(x, values, index, bias)
        else:
            y = summed(linear(x, values, index, None), line(placement.cols))
            y = y if bias is None else y + bias.to(y.dtype)
        return gathered(y, line(placement.rows), self.row_borders) if placement.whole else y

    def kernel(self, batch: int, backward: bool) -> str:
        return "rectangle"

    def after(self, pattern: SparsePattern) -> Rectangle:
        """Patterns change inside the rectangle, which stays."""
        return self

    def to_whole(self, flat: Tensor, block_size: int) -> Tensor:
        """Flat block positions in the rectangle as positions in the whole; the order stays."""
        (top, _), (left, right) = self.rows, self.cols
        width = (right - left) // block_size
        rows = flat // width + top // block_size
        return rows * (self.shape[1] // block_size) + flat % width + left // block_size

    def to_part(self, flat: Tensor, block_size: int) -> Tensor:
        """Those of flat positions in the whole layer that are inside, as positions in it."""
        (top, bottom), (left, right) = ((a // block_size, b // block_size)
                                        for a, b in (self.rows, self.cols))  # fmt: skip
        width = self.shape[1] // block_size
        row, col = flat // width, flat % width
        inside = (row >= top) & (row < bottom) & (col >= left) & (col < right)
        return (row[inside] - top) * (right - left) + col[inside] - left

    def __deepcopy__(self, memo: dict[int, Any]) -> Rectangle:
        return self  # it does not change


def part_of(layer: SparseLinear) -> Rectangle | None:
    """What a layer's rectangle is; None for a layer that is whole."""
    return layer.executor if isinstance(layer.executor, Rectangle) else None


@torch.no_grad()
def take_part(layer: SparseLinear, part: Rectangle) -> None:
    """Keep only this rank's rectangle of a layer that is whole; its Parameters become new ones."""
    pattern, slots = rectangle(layer.pattern, part.rows, part.cols)
    values = layer.values.detach()[slots.to(layer.values.device)].clone()
    bias = layer.bias
    layer.values = nn.Parameter(values, layer.values.requires_grad)
    layer.out_features, layer.in_features = pattern.shape
    if bias is not None and part.placement.rows is not None:
        own = bias.detach()[part.rows[0] : part.rows[1]].clone()
        layer.bias = nn.Parameter(own, bias.requires_grad)
    layer.executor = part
    layer._install(pattern)
    layer.resizable = True  # blocks leave and join wherever in the whole layer


@torch.no_grad()
def whole_layer(layer: SparseLinear) -> dict[str, Tensor]:
    """The state of the whole layer, on every rank: what a whole layer's `state_dict` holds.

    All ranks of the grid call it at the same time.
    """
    part = part_of(layer)
    if part is None:
        return layer.state_dict()
    b = layer.block_size
    flat = part.to_whole(layer.pattern.flat, b).to(layer.values.device)
    values = layer.values.detach()
    for axis in (part.placement.cols, part.placement.rows):
        line = part.grid.line(axis)
        flat, values = torch.cat(line.gather(flat)), torch.cat(line.gather(values))
    order = flat.argsort()
    flat = flat[order]
    width = part.shape[1] // b
    state = {
        "values": values[order],
        "rows": (flat // width).int(),
        "cols": (flat % width).int(),
    }
    if layer.bias is not None:
        bias = part.grid.line(part.placement.rows).gather(layer.bias.detach())
        state["bias"] = torch.cat(bias)
    return state
