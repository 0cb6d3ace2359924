"""Sums and gathers of activations over ranks that autograd sees through.

Each pair is as in Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", section 3: what is a sum one way is nothing the other way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynsparse.ranks import DimShard, Ranks


def same(x: Tensor, ranks: Ranks) -> Tensor:
    """`x`, which all ranks have whole; its gradient is the sum of theirs."""
    return x if ranks.alone else _Same.apply(x, ranks)


def summed(y: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks; its gradient, which all ranks have, is that of each part."""
    return y if ranks.alone else _Summed.apply(y, ranks)


def slab(x: Tensor, ranks: Ranks, borders: tuple[int, ...]) -> Tensor:
    """This rank's features of x [..., features], which all ranks have whole.

    The gradients of all slabs come together again.
    """
    return x if ranks.alone else _Slab.apply(x, ranks, borders)


def gathered(y: Tensor, ranks: Ranks, borders: tuple[int, ...]) -> Tensor:
    """All features of y [..., slab], of which each rank has a slab.

    All ranks must use them alike, so that their gradients are the same: each keeps its slab's.
    """
    return y if ranks.alone else _Gathered.apply(y, ranks, borders)


def _own(x: Tensor, ranks: Ranks, borders: tuple[int, ...]) -> Tensor:
    return DimShard(ranks, borders).narrow(x, -1).contiguous()


def _all(x: Tensor, ranks: Ranks, borders: tuple[int, ...]) -> Tensor:
    return DimShard(ranks, borders).all_gather(x, -1)


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.ranks.sum(grad.clone(memory_format=torch.contiguous_format)), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks) -> Tensor:
        return ranks.sum(y.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _Slab(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, borders: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.borders = ranks, borders
        return _own(x, ranks, borders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all(grad, ctx.ranks, ctx.borders), None, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, ranks: Ranks, borders: tuple[int, ...]) -> Tensor:
        ctx.ranks, ctx.borders = ranks, borders
        return _all(y, ranks, borders)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _own(grad, ctx.ranks, ctx.borders), None, None
