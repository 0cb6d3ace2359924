"""The cross entropy of a language model's head, without the logits of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from dynsparse._core.checks import check_choice, check_integer, check_types, check_within
from dynsparse.nn.embedding import SparseEmbedding

# Logits of a chunk, 128 MiB in float32, and of rows that are computed together.
_CHUNK_ELEMENTS = 2**25
_BLOCK_ELEMENTS = 2**19


class _CrossEntropy(Function):
    """Losses [n] of logits [n, classes] and targets int64 [n]; 0 where the target is ignored.

    It processes the logits a few rows at a time, so that temporaries stay in the cache, and its
    backward pass overwrites the logits. On a CPU that takes less than half the time of
    `torch.nn.functional.cross_entropy`, which spends much of it on new memory.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float
    ) -> Tensor:
        ignored = targets == ignore_index
        labels = targets.masked_fill(ignored, 0)[:, None]
        picked = _upcast(logits.gather(1, labels)[:, 0])
        sums, means = torch.empty_like(picked), torch.zeros_like(picked)
        for rows, block in _row_blocks(logits):
            sums[rows] = block.logsumexp(1)
            if smoothing:
                means[rows] = block.mean(1)
        ctx.save_for_backward(logits, ignored, labels, sums)
        ctx.smoothing = smoothing
        losses = sums - (1 - smoothing) * picked - smoothing * means
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        dlogits, ignored, labels, sums = ctx.saved_tensors
        scale = grad.masked_fill(ignored, 0)[:, None]
        for rows, block in _row_blocks(dlogits):
            block.sub_(sums[rows, None]).exp_()
            if ctx.smoothing:
                block.sub_(ctx.smoothing / block.shape[1])
            block.mul_(scale[rows]).scatter_add_(1, labels[rows], (ctx.smoothing - 1) * scale[rows])
            dlogits[rows] = block
        return dlogits, None, None, None


def _upcast(tensor: Tensor) -> Tensor:
    """Return the tensor in float32 if its dtype has 16 bits."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _row_blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield a few rows at a time and their numbers; views, unless the logits have 16 bits."""
    height = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    for first in range(0, len(logits), height):
        rows = slice(first, first + height)
        yield rows, _upcast(logits[rows])


@check_types
def linear_cross_entropy(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Compute `cross_entropy(head(hidden), targets)` with the logits of one chunk at a time.

        hidden = model.transformer(ids).last_hidden_state
        loss = ds.nn.linear_cross_entropy(hidden[:, :-1], model.lm_head, ids[:, 1:])

    With more than one chunk, the backward pass computes the logits of each again, and only one
    matrix [chunk_size, classes] is in memory at a time; in steps whose gradient a trainer captures
    for growth, sparse heads keep the gradients of all logits. For dense heads
    `torch.nn.functional.linear_cross_entropy` of torch 2.13, which keeps a second gradient of the
    weight instead of computing logits twice, is faster. The backward pass overwrites the logits: it
    can run only once, and there is no second derivative.

    Args:
        hidden: [..., features].
        head: the output layer: an `nn.Linear`, a `SparseLinear`, a `TiedHead`, a `SparseEmbedding`,
            whose table it then multiplies by, or another module with `out_features`.
        targets: classes, int64 [...].
        ignore_index, label_smoothing, reduction: as in `torch.nn.functional.cross_entropy`.
        chunk_size: samples in a chunk. Defaults to as many as have 128 MiB of float32 logits.

    Returns:
        The loss: a scalar, or [...] if the reduction is "none". float32 for bfloat16 and float16
        logits, otherwise the dtype of the logits.

    Raises:
        TypeError: targets that are not int64, a head without `out_features`.
        ValueError: targets of another shape than the samples, an unknown reduction, a smoothing
            outside [0, 1].
        RuntimeError: a target outside the classes.
    """
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    smoothing = check_within("label_smoothing", label_smoothing, "[0, 1]")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must be {list(hidden.shape[:-1])}, one for each sample of hidden, got "
            f"{list(targets.shape)}"
        )
    classes = getattr(head, "out_features", None)
    if not isinstance(classes, int):
        raise TypeError(f"head must have out_features, as linear layers do, got {head}")
    if chunk_size is None:
        chunk_size = max(1, _CHUNK_ELEMENTS // classes)
    check_integer("chunk_size", chunk_size, 1)
    to_logits = head.logits if isinstance(head, SparseEmbedding) else head

    def chunk_losses(x: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = _CrossEntropy.apply(to_logits(x), labels, ignore_index, smoothing)
        return losses

    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if len(rows) <= chunk_size:
        losses = chunk_losses(rows, labels)
    else:
        pairs = zip(rows.split(chunk_size), labels.split(chunk_size), strict=True)
        losses = torch.cat([checkpoint(chunk_losses, *pair, use_reentrant=False) for pair in pairs])
    if reduction == "none":
        return losses.view(targets.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != ignore_index).sum()
