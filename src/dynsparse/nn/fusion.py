"""Batch norms folded into the layers before them, for inference."""

from __future__ import annotations

import copy

import torch
from torch import nn

from dynsparse.nn.conv import SparseConv1d, SparseConv2d
from dynsparse.typed import typed


@typed
@torch.no_grad()
def fuse_conv_bn_eval(
    conv: SparseConv1d | SparseConv2d, bn: nn.BatchNorm1d | nn.BatchNorm2d
) -> SparseConv1d | SparseConv2d:
    """A copy of a sparse convolution that computes what it and the batch norm behind it compute in
    evaluation, as `torch.nn.utils.fusion.fuse_conv_bn_eval` does it for dense ones.

    A batch norm scales each output, so the pattern stays: values are scaled, the bias takes the
    rest.

    Args:
        conv: in evaluation mode.
        bn: behind it, in evaluation mode, with running statistics.

    Raises:
        ValueError: one of them in training mode, a batch norm of another number of channels or
            dimensions, or without running statistics.
    """
    if conv.training or bn.training:
        raise ValueError("fusing is for inference: call eval() on both layers first")
    if isinstance(conv, SparseConv2d) != isinstance(bn, nn.BatchNorm2d):
        raise ValueError(f"{type(bn).__name__} does not fit {type(conv).__name__}")
    if bn.num_features != conv.out_channels:
        raise ValueError(
            f"the batch norm must have {conv.out_channels} channels, got {bn.num_features}"
        )
    if bn.running_mean is None or bn.running_var is None:
        raise ValueError("the batch norm has no running statistics to fold: it normalises batches")
    fused = copy.deepcopy(conv)
    scale = (bn.running_var + bn.eps).rsqrt()
    if bn.weight is not None:
        scale = scale * bn.weight
    shift = -bn.running_mean * scale
    if conv.bias is not None:
        shift = shift + conv.bias * scale
    if bn.bias is not None:
        shift = shift + bn.bias
    values, b = fused.values, fused.block_size
    rows = scale.view(-1, b)[fused.rows.long()]  # [nnz, b]
    values.mul_(rows.squeeze(1) if b == 1 else rows[:, :, None])
    fused.bias = nn.Parameter(shift.to(values.dtype), requires_grad=values.requires_grad)
    return fused
