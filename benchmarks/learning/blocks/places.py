"""Blocks whose columns read any input and whose rows write to any output, chosen as in RigL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import linear


class Placed:
    """Computes a layer whose pattern refers to places: several places, or none, may read an input,
    and an output is the sum of its places.

    Args:
        inputs: int64 [in], the input that each place reads; outputs: int64 [out], the output that
            each place adds to.

    Attributes:
        seen: (x, dY) in natural order, of the last backward pass while `looks`.
    """

    target = None

    def __init__(self, inputs: Tensor, outputs: Tensor) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.looks = False
        self.seen: list[Tensor] = []

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        placed = x.index_select(-1, self.inputs)
        y = linear(placed, layer.values, layer._current().index, None)
        y = y.new_zeros(y.shape).index_add(-1, self.outputs, y)
        if self.looks and torch.is_grad_enabled():
            self.seen = [x.detach().flatten(0, -2)]
            y.register_hook(lambda dy: self.seen.append(dy.detach().flatten(0, -2)))
        return y if layer.bias is None else y + layer.bias

    def kernel(self, batch: int, backward: bool) -> str:
        return "by places"

    def for_pattern(self, pattern: Any) -> Placed:
        return self

    @torch.no_grad()
    def update(
        self,
        layer: SparseLinear,
        optimizer: torch.optim.Optimizer,
        share: float,
    ) -> None:
        """Move the weakest `share` of the blocks' columns, then of their rows, to other features:
        those with the largest gradient where the column has weights."""
        x, dy = self.seen
        state = [t for t in optimizer.state[layer.values].values() if t.shape == layer.values.shape]
        pattern, b = layer.pattern, layer.block_size
        present = torch.zeros(pattern.grid)
        present[pattern.rows.long(), pattern.cols.long()] = 1
        matrices = [pattern.to_dense(t.detach()) for t in (layer.values, *state)]
        gradient = (dy.t() @ x).abs()  # [out, in]
        # Columns: for every group of places, sums of gradients over the rows where it has blocks.
        sums = gradient[self.outputs].view(len(present), b, -1).sum(1)
        self._move(self.inputs, matrices, 1, present.t() @ sums, share, b)
        sums = gradient[:, self.inputs].view(len(gradient), -1, b).sum(2)
        self._move(self.outputs, matrices, 0, present @ sums.t(), share, b)
        layer.values.copy_(pattern.values_of(matrices[0]))
        for tensor, matrix in zip(state, matrices[1:], strict=True):
            tensor.copy_(pattern.values_of(matrix))

    def _move(
        self,
        places: Tensor,
        matrices: list[Tensor],
        side: int,
        scores: Tensor,
        share: float,
        b: int,
    ) -> None:
        sizes = matrices[0].abs().sum(1 - side)
        live = scores.sum(1).repeat_interleave(b) > 0
        count = int(share * int(live.sum()))
        weakest = sizes.masked_fill(~live, torch.inf).topk(count, largest=False).indices
        groups = places.view(-1, b)
        scores = scores.scatter(1, groups, -1.0)  # a group takes no feature twice
        for group in range(len(groups)):
            own = weakest[weakest // b == group]
            if len(own):
                places[own] = scores[group].topk(len(own)).indices
        for matrix in matrices:
            matrix.index_fill_(side, weakest, 0.0)
