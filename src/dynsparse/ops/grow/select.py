"""The k largest of many scores, with ties decided by position."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["select_largest"]


def select_largest(scores: Tensor, k: int) -> Tensor:
    """The positions of the `k` largest of `scores` [n], ascending, int64 [k].

    Among equal scores the smaller positions win, so that the answer is the same on every machine;
    `torch.topk` leaves that open. The scores must not hold NaN.
    """
    if not 0 <= k <= len(scores):
        raise ValueError(f"cannot select {k} of {len(scores)} scores")
    if k == 0:
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    if k == len(scores):
        return torch.arange(k, device=scores.device)
    least = torch.topk(scores, k, sorted=False).values.min()
    chosen = scores > least
    ties = (scores == least).nonzero().flatten()
    chosen[ties[: k - int(chosen.sum())]] = True
    return chosen.nonzero().flatten()
