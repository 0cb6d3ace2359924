"""Attention that looks at the blocks of a pattern, and at nothing else."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dynsparse.checks import check_flag, check_kind, check_within, is_number
from dynsparse.files.shorten import shortened
from dynsparse.ops.block_sparse import operator
from dynsparse.ops.block_sparse.products import check_operand
from dynsparse.ops.torch_internals import refuse_transforms
from dynsparse.pattern import SparsePattern

_registered = operator


def bias_of(key_padding_mask: Tensor | None, like: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """What is added to the scores of keys [N, S], -infinity where the mask is True.

    Raises:
        TypeError: a mask that is neither bool nor floating point.
        ValueError: another shape, a mask that wants a gradient.
    """
    mask = key_padding_mask
    if mask is None:
        return None
    check_kind("key_padding_mask", mask, Tensor, "a tensor or None")
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"key_padding_mask must have the shape {list(shape)}, got {list(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    if not mask.is_floating_point():
        raise TypeError(f"key_padding_mask must be bool or floating point, got {mask.dtype}")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "key_padding_mask gets no gradient where the attention has a pattern: detach it"
        )
    return mask.to(like.dtype)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: SparsePattern,
    *,
    is_causal: bool = False,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale Q K^T) V where a query sees only the keys in its blocks of a pattern.

    As `torch.nn.functional.scaled_dot_product_attention` with the pattern for a mask, at the cost
    of its blocks: neither time nor memory goes with [L, S]. A query that sees nothing gets zeros.
    On the CPU compiled kernels go through one row of blocks at a time; blocks of 16 to 64 suit
    them best. bfloat16 and float16 are computed in float32; float64, other devices and an
    installation without kernels take plain torch, over the blocks, too. Its gradient has none.

    Args:
        query, key, value: [N, heads, L, E], [N, heads, S, E], [N, heads, S, V]; any strides.
        pattern: [L, S], in elements; one for all heads and sequences.
        is_causal: no query sees keys behind its own position, also inside of blocks.
        key_padding_mask: [N, S]: True for keys that nobody sees, or what is added to the scores.
        dropout_p: the share of weights that is set to zero, in [0, 1).
        scale: of the scores; 1 / sqrt(E) when left out.

    Returns:
        [N, heads, L, V].

    Raises:
        ValueError: shapes, types or devices that do not fit, options out of range.
        TypeError: arguments of other kinds.
        RuntimeError: under transforms of torch.func, or differentiated twice.

    Source: Child et al. 2019, "Generating Long Sequences with Sparse Transformers"; Dao et al.
    2022, "FlashAttention", section 3.3, has the block-sparse form of one pass.
    """
    check_kind("pattern", pattern, SparsePattern, "a SparsePattern")
    check_flag("is_causal", is_causal)
    check_within("dropout_p", dropout_p, "[0, 1)")
    if scale is not None and (not is_number(scale) or not math.isfinite(scale)):
        raise ValueError(f"scale must be a finite number or None, got {shortened(scale)}")
    check_operand("query", query, None, L=pattern.shape[0], E=None)
    check_operand("key", key, query, S=pattern.shape[1], E=query.shape[-1])
    check_operand("value", value, query, S=pattern.shape[1], V=None)
    batch = query.shape[:-2]
    if query.dim() != 4 or key.shape[:-2] != batch or value.shape[:-2] != batch:
        raise ValueError(
            "query, key and value must be [N, heads, tokens, features] with the same N and heads, "
            f"got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if any(tensor.numel() == 0 for tensor in (query, key, value)):
        raise ValueError("there must be at least one sequence, head and feature")
    refuse_transforms("attention at the blocks of a pattern", query, key, value)
    bias = bias_of(key_padding_mask, query, (query.shape[0], pattern.shape[1]))
    # Not the whole index, which a compiler that watches would not see made.
    index = pattern if query.is_cpu else pattern._shared_on(query.device)
    # On the CPU, where an operator may read it without waiting.
    seed = torch.randint(2**63 - 1, ()) if dropout_p else None
    out, _ = torch.ops.dynsparse.block_attention(
        query,
        key,
        value,
        index.row_ptr,
        index.cols,
        bias,
        seed,
        pattern.block_size,
        is_causal,
        query.shape[-1] ** -0.5 if scale is None else float(scale),
        float(dropout_p),
    )
    found: Tensor = out
    return found
