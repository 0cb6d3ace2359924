"""Orders in which a layer's inputs and outputs are cut into blocks, and how to find them."""

from __future__ import annotations

from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dynsparse import SparsePattern
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import linear


class _Gather(torch.autograd.Function):
    """Reorders features; backward is a gather, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(-1, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy.index_select(-1, ctx.back), None, None


class Ordered:
    """Computes a layer whose pattern refers to its inputs and outputs in another order.

    Args:
        inputs: int64 [in], the input at each position; None: natural order.
        outputs: int64 [out], likewise.
    """

    target = None

    def __init__(self, inputs: Tensor | None = None, outputs: Tensor | None = None) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self._inputs_back = None if inputs is None else inputs.argsort()
        self._outputs_back = None if outputs is None else outputs.argsort()

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        if self.inputs is not None:
            x = _Gather.apply(x, self.inputs, self._inputs_back)
        if self.outputs is None:
            return linear(x, layer.values, layer._current().index, layer.bias)
        y = linear(x, layer.values, layer._current().index, None)
        y = _Gather.apply(y, self._outputs_back, self.outputs)
        return y if layer.bias is None else y + layer.bias

    def kernel(self, batch: int, backward: bool) -> str:
        return "in another order"

    def for_pattern(self, pattern: SparsePattern) -> Ordered:
        return self

    def natural(self, matrix: Tensor) -> Tensor:
        """An [out, in] matrix from the pattern's order to natural order."""
        if self._outputs_back is not None:
            matrix = matrix[self._outputs_back]
        return matrix if self._inputs_back is None else matrix[:, self._inputs_back]

    def ordered(self, matrix: Tensor) -> Tensor:
        """An [out, in] matrix from natural order to the pattern's order."""
        if self.outputs is not None:
            matrix = matrix[self.outputs]
        return matrix if self.inputs is None else matrix[:, self.inputs]


def spread(features: int, block: int) -> Tensor:
    """An order in which each block has evenly spaced features: every (features / block)-th."""
    return torch.arange(features).view(block, -1).t().flatten()


def block_sums(scores: Tensor, block: int) -> Tensor:
    """Sums of the blocks: [out, in] -> [out / b, in / b]."""
    height, width = scores.shape
    return scores.view(height // block, block, width // block, block).sum((1, 3))


def by_size(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and outputs, largest sums first."""
    return scores.sum(0).argsort(descending=True), scores.sum(1).argsort(descending=True)


def best_cut(scores: Tensor, block: int, count: int) -> tuple[Tensor, Tensor, float]:
    """Orders (inputs, outputs) in which `count` blocks hold much of `scores` [out, in]; their sum.

    Alternates between the best blocks for the orders, the best order of the inputs and that of the
    outputs for the blocks, each exact, until nothing improves. Takes the best of four starts:
    natural order, by size, and by each of the first two pairs of singular vectors.
    """
    scores = scores.double()
    height, width = scores.shape
    shares = scores / scores.sum(0, keepdim=True).clamp_min(1e-30)
    shares = shares - shares.mean(1, keepdim=True)
    u, _, v = torch.linalg.svd(shares, full_matrices=False)
    begins = [
        (torch.arange(width), torch.arange(height)),
        by_size(scores),
        (v[0].argsort(), u[:, 0].argsort()),
        (v[1].argsort(), u[:, 1].argsort()),
    ]
    best: tuple[Tensor, Tensor, float] | None = None
    for inputs, outputs in begins:
        found = _climbed(scores, inputs, outputs, block, count)
        if best is None or found[2] > best[2]:
            best = found
    assert best is not None
    return best


def _climbed(
    scores: Tensor, inputs: Tensor, outputs: Tensor, block: int, count: int
) -> tuple[Tensor, Tensor, float]:
    before = -1.0
    while True:
        sums = block_sums(scores[outputs][:, inputs], block)
        chosen = torch.zeros(sums.numel(), dtype=torch.float64)
        best = sums.flatten().topk(count)
        chosen[best.indices] = 1
        now = float(best.values.sum())
        if now <= before * (1 + 1e-6):
            return inputs, outputs, now
        before = now
        chosen = chosen.view_as(sums)
        groups = scores[outputs].view(len(sums), block, -1).sum(1)  # [R, in]
        inputs = _assigned(groups.t() @ chosen, block)
        groups = scores[:, inputs].view(len(scores), -1, block).sum(2)  # [out, C]
        outputs = _assigned(groups @ chosen.t(), block)


def _assigned(gains: Tensor, block: int) -> Tensor:
    """The order of features [n] in groups of `block` with the largest sum of gains [n, groups]."""
    places = gains.repeat_interleave(block, 1).numpy()
    rows, columns = linear_sum_assignment(places, maximize=True)
    group = torch.from_numpy(columns // block)
    return torch.argsort(group[torch.from_numpy(rows).argsort()], stable=True)


@torch.no_grad()
def recut(
    layer: SparseLinear,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    outputs: Tensor,
    gradient: Tensor,
) -> float:
    """Reorder the layer and choose the blocks where the gradient [out, in], in natural order, is
    largest; return the share of the weights' magnitude in these blocks.

    Weights that the blocks cover keep their value and state; the others start as in a new layer.
    """
    before = layer.executor if isinstance(layer.executor, Ordered) else Ordered()
    after = Ordered(inputs, outputs)
    weight, held = (
        after.ordered(before.natural(matrix.to(layer.values)))
        for matrix in (layer.to_dense(), layer.pattern.to_mask())
    )
    state = {
        name: after.ordered(before.natural(layer.pattern.to_dense(tensor)))
        for name, tensor in optimizer.state[layer.values].items()
        if tensor.shape == layer.values.shape
    }
    b = layer.block_size
    sums = block_sums(after.ordered(gradient).abs(), b).flatten()
    flat = sums.topk(layer.pattern.nnz).indices.sort().values
    pattern = SparsePattern.from_flat(flat, shape=tuple(weight.shape), block_size=b)
    magnitudes = block_sums(weight.abs(), b).flatten()
    layer.executor = None
    layer.set_pattern(pattern)
    bias = layer.bias.clone()
    layer.reset_parameters()
    layer.bias.copy_(bias)
    kept = torch.where(pattern.values_of(held) > 0, pattern.values_of(weight), layer.values)
    layer.values.copy_(kept)
    for name, matrix in state.items():
        optimizer.state[layer.values][name].copy_(pattern.values_of(matrix))
    layer.executor = after
    return float(magnitudes[flat].sum() / magnitudes.sum())


def by_correlation(x: Tensor, block: int) -> Tensor:
    """An order of the features of x [samples, in] in which those of a block are correlated.

    By recursive bisection with the second eigenvector of the normalized correlations; constant
    features come last.
    """
    x = x.double() - x.double().mean(0)
    norms = x.norm(dim=0)
    likeness = (
        (x.t() @ x / torch.outer(norms, norms).clamp_min(1e-30)).clamp_min(0).fill_diagonal_(0)
    )
    still = norms < 1e-6
    first = still.to(torch.int8).argsort(stable=True)
    live = -(-int((~still).sum()) // block) * block
    return torch.cat([_halved(likeness + 1e-6, first[:live], block), first[live:]])


def dealt_out(x: Tensor, block: int) -> Tensor:
    """An order of the features of x [samples, in]: those with 99 % of the variance are dealt
    round-robin to as few blocks as hold them; the others come last."""
    variances = x.var(0)
    order = variances.argsort(descending=True, stable=True)
    needed = int((variances[order].cumsum(0) < 0.99 * variances.sum()).sum()) + 1
    live = -(-needed // block) * block
    dealt = order[:live].sort().values.view(block, -1).t().flatten()
    return torch.cat([dealt, order[live:].sort().values])


def _halved(likeness: Tensor, features: Tensor, block: int) -> Tensor:
    if len(features) <= block:
        return features
    among = likeness[features][:, features]
    scale = among.sum(1).rsqrt()
    vectors = torch.linalg.eigh(scale[:, None] * among * scale).eigenvectors
    order = features[(vectors[:, -2] * scale).argsort()]
    middle = (len(order) // block + 1) // 2 * block
    return torch.cat([_halved(likeness, part, block) for part in order.tensor_split([middle])])
