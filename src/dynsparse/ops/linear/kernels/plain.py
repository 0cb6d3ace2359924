"""The passes in plain torch, called like the other kernels; any device, dtype and block size."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.ops.linear import naive
from dynsparse.ops.linear.layer_index import LayerIndex


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """y [B, out] = x W^T + bias: see `sparse.forward`."""
    return naive.forward(x, values, p.index, bias)


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    dbias: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [B, in], dvalues like values): see `sparse.backward`."""
    if dbias is not None:
        torch.sum(dy, 0, out=dbias)
    dx = naive.grad_input(dy, values, p.index) if need_input else None
    return dx, naive.grad_weight(dy, x, values, p.index) if need_values else None
