"""The dense gradient of a layer's weights, cut into pieces that fit beside what the tiles hold.

PopSparse only reports the serial splits that the planner of dense products would choose for it
(`fully_connected_dense_grad_w_serial_splits`); Graphcore's application had a product cut that way.
Here each piece is planned, computed, pooled and sent before the next.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from popsparse.planning.dense_planner import DensePlan
from popsparse.planning.dense_planner import plan as plan_dense
from popsparse.planning.parts import ceil_div
from popsparse.planning.plan import Plan
from popsparse.planning.update import Update


class GradientPiece(NamedTuple):
    """Output channels [x0, x1) and input channels [y0, y1) of each group; `plan` of the product
    [y1 - y0, batch] x [batch, x1 - x0]."""

    x0: int
    x1: int
    y0: int
    y1: int
    plan: DensePlan


def plan_gradient(plan: Plan, update: Update) -> list[GradientPiece]:
    """The pieces, in the order they are computed; they meet at edges of blocks.

    As many as the planner's serial splits of the whole product; twice as many, and again, where a
    piece does not fit.

    Raises:
        ValueError: not even a piece of one block fits.
    """
    sizes = plan.sizes
    edges = plan.params.sparsity_params.block_dimensions
    blocks = sizes.x // edges[0], sizes.y // edges[1]
    try:
        whole = _planned(plan, update, sizes.x, sizes.y)
        splits = [1, whole.serial_out] if whole.swapped else [whole.serial_out, 1]
    except ValueError:
        splits = [1, 1]
    while True:
        splits = [min(split, count) for split, count in zip(splits, blocks, strict=True)]
        each = [
            ceil_div(count, split) * edge
            for count, split, edge in zip(blocks, splits, edges, strict=True)
        ]
        try:
            return _pieces(plan, update, each)
        except ValueError:
            room = [dim for dim in (0, 1) if splits[dim] < blocks[dim]]
            if not room:
                raise
            splits[max(room, key=lambda dim: each[dim])] *= 2


def _planned(plan: Plan, update: Update, x: int, y: int) -> DensePlan:
    """One group's product, on its share of the tiles."""
    target = plan.target
    share = target.with_(tiles=max(1, target.tiles // plan.sizes.groups))
    partials = update.partials_type if update.partials_type.size >= plan.dtype.size else plan.dtype
    return plan_dense(
        y,
        plan.sizes.z,
        x,
        plan.dtype,
        share,
        partials=partials,
        available_memory_proportion=update.available_memory_proportion,
    )


def _pieces(plan: Plan, update: Update, each: list[int]) -> list[GradientPiece]:
    sizes = plan.sizes
    found = []
    for x0, y0 in product(range(0, sizes.x, each[0]), range(0, sizes.y, each[1])):
        x1, y1 = min(x0 + each[0], sizes.x), min(y0 + each[1], sizes.y)
        piece = GradientPiece(x0, x1, y0, y1, _planned(plan, update, x1 - x0, y1 - y0))
        _check_room(plan, update, piece)
        found.append(piece)
    return found


def _check_room(plan: Plan, update: Update, piece: GradientPiece) -> None:
    """Raise ValueError where a piece does not fit beside the weights, by the planners' figures."""
    target, size = plan.target, plan.dtype.size
    held = plan.buckets.words * 2 + plan.buckets.nz_elements * size * (1 + update.optimizer_slots)
    if plan.use_dense:
        weights = plan.sizes.groups * plan.sizes.x * plan.sizes.y
        held = ceil_div(weights, target.tiles) * size * (1 + update.optimizer_slots)
    operands = ceil_div(plan.sizes.groups * plan.sizes.z * (plan.sizes.x + plan.sizes.y), 1)
    held += ceil_div(operands, target.tiles) * size
    blocks = (piece.x1 - piece.x0) * (piece.y1 - piece.y0) * plan.sizes.groups
    pooled = ceil_div(blocks, target.tiles) * size
    wanted = held + pooled + piece.plan.resident_bytes + piece.plan.temporary_bytes
    if wanted > target.bytes_per_tile:
        raise ValueError(
            f"the dense gradient of {piece.x1 - piece.x0} x {piece.y1 - piece.y0} weights needs "
            f"{wanted:,} bytes a tile with the layer's own, {target.name} has "
            f"{target.bytes_per_tile:,}: take smaller sizes or more tiles"
        )
