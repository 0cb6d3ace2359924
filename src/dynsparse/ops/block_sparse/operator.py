"""Attention at blocks as torch's dispatcher sees it, its autograd, and what computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops.block_sparse import kernels, plain
from dynsparse.ops.block_sparse.kernels import Settings
from dynsparse.ops.linear.layer_index import TensorCache

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

_looked_through = TensorCache()


def _check_index(row_ptr: Tensor, cols: Tensor, queries: int, keys: int, block: int) -> None:
    """Raise RuntimeError for what would make kernels read where nothing is."""
    sizes = row_ptr.dim() == cols.dim() == 1 and len(row_ptr) * block == queries + block
    kinds = row_ptr.dtype == cols.dtype == torch.int32
    if block < 1 or keys % block or not sizes or not kinds or not row_ptr.is_contiguous():
        raise RuntimeError(
            f"row_ptr must be int32 [{queries} queries / block + 1] and cols int32 [nnz], for "
            f"blocks that divide the {keys} keys, got {row_ptr.dtype} {list(row_ptr.shape)}, "
            f"{cols.dtype} {list(cols.shape)} and a block of {block}"
        )
    if not cols.is_cpu or _looked_through.get((row_ptr, cols)) == (keys, block):
        return
    steps = row_ptr.diff()
    ascends = not int(row_ptr[0]) and int(row_ptr[-1]) == len(cols) and int(steps.min()) >= 0
    first, last = (int(cols.min()), int(cols.max())) if len(cols) else (0, 0)
    if not ascends or first < 0 or last >= keys // block or not cols.is_contiguous():
        raise RuntimeError(
            "row_ptr must ascend from 0 to the number of blocks, and cols point to keys: take them "
            "from SparsePattern.index"
        )
    _looked_through.put((row_ptr, cols), (keys, block))


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


def _prepared(q: Tensor, rest: tuple[Any, ...]) -> tuple[Any, torch.dtype, tuple[Any, ...]]:
    """What computes, in which type, and what is told to it beside q, k and v."""
    row_ptr, cols, bias, seed, block, causal, scale, dropout = rest[:8]
    low = q.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if low else q.dtype
    fast = q.is_cpu and dtype == torch.float32 and native.load() is not None
    settings = Settings(block, causal, scale, dropout, 0 if seed is None else int(seed))
    bias = None if bias is None else bias.to(dtype).contiguous()
    return kernels if fast else plain, dtype, (row_ptr, cols, bias, settings)


def _is_empty(*tensors: Tensor) -> bool:
    return any(tensor.numel() == 0 for tensor in tensors)


def _forward(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, rest)
    _check_index(rest[0], rest[1], q.shape[2], k.shape[2], rest[4])
    if _is_empty(q, k, v):
        raise RuntimeError("there must be sequences, heads and features")
    way, dtype, told = _prepared(q, rest)
    out, sums = way.forward(q.to(dtype), k.to(dtype), v.to(dtype), *told)
    return _laid_out(out.to(q.dtype)), sums


def _laid_out(out: Tensor) -> Tensor:
    """[N, heads, tokens, features] with the heads of a token beside each other."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, rest)
    _check_index(rest[0], rest[1], q.shape[2], k.shape[2], rest[4])
    shape = (*q.shape[:3], v.shape[3])
    if grad.shape != shape or out.shape != shape or sums.shape != q.shape[:3]:
        raise RuntimeError(f"grad and out must be {list(shape)}, and sums {list(q.shape[:3])}")
    way, dtype, told = _prepared(q, rest)
    operands = [tensor.to(dtype) for tensor in (grad, q, k, v, out)]
    found = way.backward(*operands, sums.to(dtype).contiguous(), *told, rest[8])
    # Operators return tensors: an empty one stands for a gradient that is not needed.
    made = [q.new_empty(0) if t is None else _laid_out(t.to(q.dtype)) for t in found]
    return made[0], made[1], made[2]


_library.impl("block_attention", _forward, "CompositeExplicitAutograd")
_library.impl("block_attention_backward", _backward, "CompositeExplicitAutograd")


def _like(q: Tensor, shape: Sequence[int]) -> Tensor:
    n, heads, tokens, features = shape
    return q.new_empty(n, tokens, heads, features).transpose(1, 2)


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _check(q, k, v, rest)
    sums = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _like(q, (*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=sums)


def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    made = [
        _like(q, t.shape) if n else q.new_empty(0) for t, n in zip((q, k, v), rest[8], strict=True)
    ]
    return made[0], made[1], made[2]


_library.impl("block_attention", _forward_shapes, "Meta")
_library.impl("block_attention_backward", _backward_shapes, "Meta")


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, row_ptr, cols, bias, seed, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output, row_ptr, cols, bias, seed)


def _autograd(ctx: Any, grad: Tensor, _: Any) -> Any:
    needed = list(ctx.needs_input_grad[:3])
    found = torch.ops.dynsparse.block_attention_backward(
        grad, *ctx.saved_tensors, *ctx.settings, needed
    )
    made = [t if n else None for t, n in zip(found, needed, strict=True)]
    return *made, *[None] * 8


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


def _under_autocast(device: str) -> None:
    def lowered(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
            return tensor
        return tensor.to(torch.get_autocast_dtype(device))

    def forward(q: Tensor, k: Tensor, v: Tensor, row_ptr: Tensor, cols: Tensor, *rest: Any) -> Any:
        first = [lowered(tensor) for tensor in (q, k, v)]
        with torch.autocast(device, enabled=False):
            bias, *others = rest
            return torch.ops.dynsparse.block_attention(
                *first, row_ptr, cols, lowered(bias), *others
            )

    def backward(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return torch.ops.dynsparse.block_attention_backward(*args)

    _library.impl("block_attention", forward, f"Autocast{device.upper()}")
    _library.impl("block_attention_backward", backward, f"Autocast{device.upper()}")


_under_autocast("cpu")
_under_autocast("cuda")
