"""Sparse layers of the matrices that ONNX files hold."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern

__all__ = ["layer_with"]


@torch.no_grad()
def layer_with(weight: Tensor, pattern: SparsePattern, bias: nn.Parameter | None) -> SparseLinear:
    """A layer of what `weight` [out, in] has at the pattern."""
    height, width = weight.shape
    layer = SparseLinear(width, height, bias=False, pattern=pattern, dtype=weight.dtype)
    b = pattern.block_size
    blocks = weight.reshape(height // b, b, width // b, b).transpose(1, 2)
    values = blocks[pattern.rows.long(), pattern.cols.long()]
    layer.values.copy_(values.reshape(layer.values.shape))
    layer.register_parameter("bias", bias)
    return layer
