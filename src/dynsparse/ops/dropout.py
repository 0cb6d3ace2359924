"""Dropout that is fast on a CPU: torch's own draws one random number after another.

The mask is not stored but drawn again for the backward pass, from its seed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from dynsparse._core import native
from dynsparse._core.checks import check_kind, check_within
from dynsparse.ops.torch_internals import is_plain_eager


def _apply_mask(x: Tensor, seed: int, rate: float) -> Tensor:
    """Zero about a share `rate` of the entries of x and scale the others by 1 / (1 - rate)."""
    x = x.contiguous()
    y = torch.empty_like(x)
    # Random int32 below the threshold are dropped: the rate is exact to 2^-32.
    dropped = min(round(rate * 2**32), 2**32 - 1)
    threads = torch.get_num_threads()
    native.call(
        "dynsparse_dropout", x, y, x.numel(), seed, dropped - 2**31, 1 / (1 - rate), threads
    )
    return y


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, rate):
        ctx.seed, ctx.rate = seed, rate
        return _apply_mask(x, seed, rate)

    @staticmethod
    def backward(ctx, dy):
        return _Dropout.apply(dy, ctx.seed, ctx.rate), None, None


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Zero each entry of x with probability `rate` and scale the others by 1 / (1 - rate).

    Like `torch.nn.functional.dropout`, which it calls under compilers and transforms, for dtypes
    other than float32, on other devices and without compiled kernels. Otherwise the masks differ
    from torch's: the seed of each call is drawn from torch's global generator, and the mask depends
    on it alone, not on the number of threads.

    Args:
        x: any shape and strides.
        rate: in [0, 1].
        training: False returns x.

    Returns:
        The shape of x; contiguous where it was computed here.

    Raises:
        ValueError: a rate outside [0, 1].
        TypeError: a rate that is no number; x that is not floating point.
    """
    check_within("dropout", rate, "[0, 1]")
    if not check_kind("x", x, Tensor, "a tensor").is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if not training or rate == 0:
        return x
    fast = is_plain_eager(x) and x.is_cpu and x.dtype is torch.float32 and rate < 1
    if not fast or native.load() is None:
        return functional.dropout(x, rate)
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    if x.requires_grad and torch.is_grad_enabled():
        return _Dropout.apply(x, seed, rate)
    return _apply_mask(x, seed, rate)
