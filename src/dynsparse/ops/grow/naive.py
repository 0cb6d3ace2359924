"""Growth through the dense gradient, in a few lines of plain torch: the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.pattern import SparsePattern


def topk_outside_naive(
    pairs: list[tuple[Tensor, Tensor]], pattern: SparsePattern, k: int, *, pooling: str = "sum"
) -> tuple[Tensor, Tensor]:
    """Return the flat block positions [k] and scores [k] of `topk_outside`, best first."""
    wide = torch.float64 if any(t.dtype == torch.float64 for p in pairs for t in p) else None
    dense = sum(dy.to(wide or torch.float32).t() @ x.to(wide or torch.float32) for x, dy in pairs)
    (height, width), b = pattern.grid, pattern.block_size
    blocks = torch.as_tensor(dense).abs().view(height, b, width, b).transpose(1, 2)
    blocks = blocks.reshape(height * width, b * b)
    if pooling == "max":
        scores = blocks.amax(1)
    else:
        scores = blocks.mean(1) if pooling == "avg" else blocks.sum(1)
    scores[pattern.flat] = -1
    order = scores.sort(descending=True, stable=True).indices[:k]
    return order, scores[order]
