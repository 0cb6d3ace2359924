"""The loss of a language model, and what is measured beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of every token in nats: logits [n, T, V], targets [n, T] -> [n, T]."""
    # Sixteen bits are too few for the sum of exponentials.
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets
    )


def repetition_weights(targets: Tensor) -> Tensor:
    """Weights [n, T], rows summing to 1, that count every distinct token of a sequence alike.

    The weight of a token is 1 / how often the sequence has it, as in the language model of
    Graphcore's dynamic sparsity application, over the number of distinct tokens: so every sequence
    counts the same, and micro-batches add up to the batch.
    """
    order = targets.sort(1)
    begins = torch.ones_like(order.values, dtype=torch.bool)
    begins[:, 1:] = order.values[:, 1:] != order.values[:, :-1]
    group = begins.cumsum(1) - 1
    counts = torch.zeros_like(targets).scatter_add_(1, group, torch.ones_like(targets))
    sorted_weights = 1.0 / (counts.gather(1, group) * begins.sum(1, keepdim=True))
    return torch.empty_like(sorted_weights).scatter_(1, order.indices, sorted_weights)
