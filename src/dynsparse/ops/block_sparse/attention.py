"""Attention over the blocks of a pattern: the function, its operator and its derivatives."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse._core.checks import check_flag, check_kind, check_within, is_number, shorten
from dynsparse.ops.block_sparse import kernels, plain
from dynsparse.ops.block_sparse.kernels import Settings, empty_by_token
from dynsparse.ops.block_sparse.products import check_operand
from dynsparse.ops.linear.autograd import register_autocast
from dynsparse.ops.linear.layer_index import check_rows
from dynsparse.ops.torch_internals import refuse_transforms
from dynsparse.pattern import SparsePattern

_REST = (
    "Tensor row_ptr, Tensor cols, Tensor? bias, Tensor? seed, int block, bool causal, "
    "float scale, float dropout"
)
_library = torch.library.Library("dynsparse", "FRAGMENT")
_library.define(f"block_attention(Tensor q, Tensor k, Tensor v, {_REST}) -> (Tensor, Tensor)")
_library.define(
    "block_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor sums, "
    f"{_REST}, bool[] needed) -> (Tensor, Tensor, Tensor)"
)


def _check_index(row_ptr: Tensor, cols: Tensor, queries: int, keys: int, block: int) -> None:
    """Raise RuntimeError if kernels would read out of bounds with this index."""
    sizes = row_ptr.dim() == cols.dim() == 1 and len(row_ptr) * block == queries + block
    kinds = row_ptr.dtype == cols.dtype == torch.int32
    contiguous = row_ptr.is_contiguous() and cols.is_contiguous()
    if block < 1 or keys % block or not sizes or not kinds or not contiguous:
        raise RuntimeError(
            f"row_ptr must be int32 [{queries} queries / block + 1] and cols int32 [nnz], "
            f"contiguous, for blocks that divide the {keys} keys, got {row_ptr.dtype} "
            f"{list(row_ptr.shape)}, {cols.dtype} {list(cols.shape)} and a block of {block}"
        )
    if cols.is_cpu:
        check_rows(row_ptr, cols, keys // block)


def _check(q: Tensor, k: Tensor, v: Tensor, rest: tuple[Any, ...]) -> None:
    _, _, bias, seed, _, _, _, dropout = rest[:8]
    fits = (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[:2] == k.shape[:2] == v.shape[:2]
        and q.shape[3] == k.shape[3]
        and k.shape[2] == v.shape[2]
    )
    if not fits:
        raise RuntimeError(
            "query, key and value must be [N, heads, L, E], [N, heads, S, E] and [N, heads, S, V], "
            f"got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    for name, tensor in (("key", k), ("value", v), ("bias", bias)):
        other = tensor is not None and (tensor.dtype, tensor.device) != (q.dtype, q.device)
        if other or not q.is_floating_point():
            raise RuntimeError(
                f"query, key, value and bias must be of one floating point type on one device, got "
                f"{q.dtype} on {q.device} and for {name} {tensor.dtype} on {tensor.device}"
            )
    if bias is not None and bias.shape != (q.shape[0], k.shape[2]):
        raise RuntimeError(
            f"bias must be [{q.shape[0]}, {k.shape[2]}], got the shape {list(bias.shape)}"
        )
    if dropout and (seed is None or not 0 < dropout < 1):
        raise RuntimeError(f"dropout must lie in [0, 1) and needs a seed, got {dropout}")
    if q.shape[2] == 0 or k.shape[2] == 0:
        raise RuntimeError("there must be queries and keys")


def _prepare(q: Tensor, rest: tuple[Any, ...]) -> tuple[Any, torch.dtype, tuple[Any, ...]]:
    """Return the module that computes, the dtype, and its arguments besides q, k and v."""
    row_ptr, cols, bias, seed, block, causal, scale, dropout = rest[:8]
    low = q.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if low else q.dtype
    fast = q.is_cpu and dtype == torch.float32 and native.load() is not None
    settings = Settings(block, causal, scale, dropout, 0 if seed is None else int(seed))
    bias = None if bias is None else bias.to(dtype).contiguous()
    return kernels if fast else plain, dtype, (row_ptr, cols, bias, settings)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, rest)
    _check_index(rest[0], rest[1], q.shape[2], k.shape[2], rest[4])
    if any(tensor.numel() == 0 for tensor in (q, k, v)):
        raise RuntimeError("there must be sequences, heads and features")
    module, dtype, arguments = _prepare(q, rest)
    out, sums = module.forward(q.to(dtype), k.to(dtype), v.to(dtype), *arguments)
    return _order_heads(out.to(q.dtype)), sums


def _order_heads(out: Tensor) -> Tensor:
    """Copy [N, heads, tokens, features] so that the heads of a token are adjacent in memory."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, rest)
    _check_index(rest[0], rest[1], q.shape[2], k.shape[2], rest[4])
    shape = (*q.shape[:3], v.shape[3])
    if grad.shape != shape or out.shape != shape or sums.shape != q.shape[:3]:
        raise RuntimeError(f"grad and out must be {list(shape)}, and sums {list(q.shape[:3])}")
    module, dtype, arguments = _prepare(q, rest)
    operands = [tensor.to(dtype) for tensor in (grad, q, k, v, out)]
    computed = module.backward(*operands, sums.to(dtype).contiguous(), *arguments, rest[8])
    # Operators return tensors: an empty one stands for a gradient that is not needed.
    dq, dk, dv = (q.new_empty(0) if t is None else _order_heads(t.to(q.dtype)) for t in computed)
    return dq, dk, dv


_library.impl("block_attention", _forward, "CompositeExplicitAutograd")
_library.impl("block_attention_backward", _backward, "CompositeExplicitAutograd")


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, rest)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = empty_by_token(q, (*q.shape[:3], v.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=sums)


def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    needed = zip((q, k, v), rest[8], strict=True)
    dq, dk, dv = (empty_by_token(q, t.shape) if n else q.new_empty(0) for t, n in needed)
    return dq, dk, dv


_library.impl("block_attention", _forward_shapes, "Meta")
_library.impl("block_attention_backward", _backward_shapes, "Meta")


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, row_ptr, cols, bias, seed, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, row_ptr, cols, bias, seed)


def _autograd(ctx: Any, grad: Tensor, _: Any) -> Any:
    needed = list(ctx.needs_input_grad[:3])
    computed = torch.ops.dynsparse.block_attention_backward(
        grad, *ctx.saved_tensors, *ctx.settings, needed
    )
    gradients = [t if n else None for t, n in zip(computed, needed, strict=True)]
    return *gradients, *[None] * 8


def _no_double_backward(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "attention at the blocks of a pattern has no second derivative: call backward without "
        "create_graph=True"
    )


torch.library.register_autograd(
    "dynsparse::block_attention", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd(
    "dynsparse::block_attention_backward", _no_double_backward, lib=_library
)


register_autocast(_library, "block_attention", cast=(0, 1, 2, 5))  # query, key, value and bias


def additive_mask(mask: Tensor, name: str, like: Tensor) -> Tensor:
    """Return a mask as a tensor of the dtype of `like` to add to scores: -infinity for True."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    if mask.is_floating_point():
        return mask.to(like.dtype)
    raise TypeError(f"{name} must be bool or floating point, got {mask.dtype}")


def bias_of(key_padding_mask: Tensor | None, like: Tensor, shape: tuple[int, int]) -> Tensor | None:
    """Return the bias of the scores of keys [N, S], -infinity where the mask is True.

    Raises:
        TypeError: a mask that is neither bool nor floating point.
        ValueError: another shape, a mask that requires a gradient.
    """
    mask = key_padding_mask
    if mask is None:
        return None
    check_kind("key_padding_mask", mask, Tensor, "a tensor or None")
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"key_padding_mask must have the shape {list(shape)}, got {list(mask.shape)}"
        )
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "key_padding_mask gets no gradient where the attention has a pattern: detach it"
        )
    return additive_mask(mask, "key_padding_mask", like)


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
    """Compute softmax(scale Q K^T) V in which queries attend to the keys in their blocks only.

    Like `torch.nn.functional.scaled_dot_product_attention` with the pattern as a mask, at the cost
    of its blocks: time and memory do not scale with [L, S]. A query without keys gets zeros. On the
    CPU compiled kernels go through one row of blocks at a time; blocks of 16 to 64 suit them best.
    bfloat16 and float16 are computed in float32; float64, other devices and an installation without
    kernels use plain torch, also over the blocks. There is no second derivative.

    Args:
        query, key, value: [N, heads, L, E], [N, heads, S, E], [N, heads, S, V]; any strides.
        pattern: [L, S], in elements; one for all heads and sequences.
        is_causal: no query attends to later keys, even inside blocks.
        key_padding_mask: [N, S]: True for keys to ignore, or a bias of the scores.
        dropout_p: the dropout rate of the weights, in [0, 1).
        scale: the scale of the scores; defaults to 1 / sqrt(E).

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
        raise ValueError(f"scale must be a finite number or None, got {shorten(scale)}")
    check_operand("query", query, None, L=pattern.shape[0], E=None)
    check_operand("key", key, query, S=pattern.shape[1], E=query.shape[-1])
    check_operand("value", value, query, S=pattern.shape[1], V=None)
    batch = query.shape[:-2]
    if query.dim() != 4 or key.shape[:-2] != batch or value.shape[:-2] != batch:
        raise ValueError(
            "query, key and value must be [N, heads, tokens, features] with the same N and heads, "
            f"got {list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    if not query.shape[0]:
        return query @ key.mT @ value  # an empty result that has derivatives
    if any(tensor.numel() == 0 for tensor in (query, key, value)):
        raise ValueError("there must be at least one head and feature")
    refuse_transforms("attention at the blocks of a pattern", query, key, value)
    bias = bias_of(key_padding_mask, query, (query.shape[0], pattern.shape[1]))
    # Not `pattern.index`, which a compiler could not trace.
    index = pattern if query.is_cpu else pattern._shared_on(query.device)
    # On the CPU, where the operator reads it without synchronising.
    seed = torch.randint(2**63 - 1, (), device="cpu") if dropout_p else None
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
    result: Tensor = out
    return result
